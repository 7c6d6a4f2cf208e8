"""Log-probabilities of prompts on their way through a router: none is lost or repeated, and none is kept."""

from __future__ import annotations

import math
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.v1 import inference_pb2 as pb
from tests.router import fakes
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, collect, drain, running_router

PROMPT = [*range(5, 2505)]


@pytest.fixture(autouse=True)
def long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "CONTEXT", 4096)


def asked(**sampling: Any) -> pb.GenerateRequest:
    sampling = {"max_tokens": 4, "prompt_logprobs": 2, **sampling}
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=pb.Sampling(**sampling))


def check(chunks: list[pb.Chunk], first: int = 0, answer: int = 4) -> None:
    """All of the prompt's tokens from a position on, then the answer."""
    scored = [chunk for chunk in chunks if chunk.prompt_logprobs]
    assert chunks[: len(scored)] == scored
    assert not any(chunk.token_ids or chunk.text for chunk in scored)
    entries = [entry for chunk in scored for entry in chunk.prompt_logprobs]
    assert [entry.id for entry in entries] == PROMPT[first:]
    assert [entry.rank for entry in entries] == [*range(first, len(PROMPT))]
    assert all(len(entry.top_ids) == (2 if entry.rank else 0) for entry in entries)
    for entry in entries:
        assert entry.logprob == -entry.rank if entry.rank else math.isnan(entry.logprob)
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == [SCRIPT[index % len(SCRIPT)] for index in range(answer)]


async def test_they_come_before_the_answer_and_are_acknowledged_as_the_client_takes_them(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, stride=16)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        started, chunks, finished = await collect(rig.stub.Generate(asked()))
        check(chunks)
        assert (started.prompt_tokens, finished.usage.prompt_tokens) == (len(PROMPT), len(PROMPT))
        assert verifier.starts[0].scored == 1
        assert verifier.acknowledged == sorted(verifier.acknowledged)
        assert any(position < len(PROMPT) for position in verifier.acknowledged)
        log = (await rig.sessions.read(started.session_id)).tokens
        assert [*log] == [*PROMPT, *SCRIPT[:4]]


async def test_another_verifier_goes_on_where_the_first_one_went_down(redis_url: str) -> None:
    first, second = FakeVerifier(SCRIPT, stride=16), FakeVerifier(SCRIPT, stride=16)
    first.scores_until = 305
    async with (
        running_router(redis_url) as rig,
        announced(first, rig.registry, MODEL.digest),
    ):
        call = rig.stub.Generate(asked())
        events = [await call.read()]
        async with announced(second, rig.registry, MODEL.digest):
            while (event := await call.read()) is not grpc.aio.EOF:
                events.append(event)
        check([event.chunk for event in events if event.HasField("chunk")])
    starts = [*first.starts, *second.starts]
    assert starts[0].scored == 1
    assert {start.scored for start in starts[1:]} == {305}


async def test_a_client_that_comes_back_within_the_prompt_gets_the_rest_of_it(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, stride=16, pace_s=0.005)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(asked())
        session = (await call.read()).started.session_id
        while (event := await call.read()).chunk.next_position < 100:
            pass
        position = event.chunk.next_position
        resumed = pb.ResumeRequest(session_id=session, next_position=position)
        _, chunks, _ = await collect(rig.stub.Resume(resumed))
        check(chunks, position)
        assert verifier.starts[-1].scored == position


async def test_what_is_durable_of_an_answer_comes_behind_the_rest_of_its_prompt(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, stride=50, pace_s=0.02)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(asked(max_tokens=400))
        session = (await call.read()).started.session_id
        while not (await call.read()).chunk.token_ids:
            pass
        resumed = pb.ResumeRequest(session_id=session, next_position=2001)
        _, chunks, finished = await collect(rig.stub.Resume(resumed))
        check(chunks, 2001, 400)
        assert len(verifier.starts[-1].tokens) > len(PROMPT)
        assert finished.usage.completion_tokens == 400


async def test_an_answer_that_has_ended_is_resumed_behind_its_prompt_alone(redis_url: str) -> None:
    async with running_router(redis_url) as rig, announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest):
        request = asked()
        request.idempotency_key = "once"
        started, _, _ = await collect(rig.stub.Generate(request))
        for again in (rig.stub.Generate(request), rig.stub.Resume(pb.ResumeRequest(session_id=started.session_id))):
            with pytest.raises(grpc.aio.AioRpcError, match="log-probabilities of a prompt are not kept") as refused:
                await drain(again)
            assert refused.value.code() == grpc.StatusCode.OUT_OF_RANGE
        behind = pb.ResumeRequest(session_id=started.session_id, next_position=len(PROMPT))
        _, chunks, _ = await collect(rig.stub.Resume(behind))
        assert [token for chunk in chunks for token in chunk.token_ids] == SCRIPT[:4]
        astray = pb.ResumeRequest(session_id=started.session_id, next_position=9, text_offset=1)
        with pytest.raises(grpc.aio.AioRpcError, match="next_position: is 9"):
            await drain(rig.stub.Resume(astray))


async def test_a_verifier_that_knows_none_is_not_believed(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    verifier.scores = False
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        with pytest.raises(grpc.aio.AioRpcError, match="before it sent the prompt's log-probabilities"):
            await drain(rig.stub.Generate(asked()))


async def test_a_cancelled_prompt_ends_at_once(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.05)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(asked())
        session = (await call.read()).started.session_id
        await rig.stub.Cancel(pb.CancelRequest(session_id=session))
        events = await drain(call)
        assert events[-1].finished.usage.completion_tokens == 0
