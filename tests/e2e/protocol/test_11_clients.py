"""11. Clients."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from outrider.fleet.cluster import LocalCluster
from outrider.rpc.channels import open_channel
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.inference_pb2_grpc import InferenceStub
from tests.e2e.mini_router import described
from tests.e2e.protocol.peers import idle
from tests.e2e.protocol.stream_probe import End, end_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

TIMEOUT_S = 60


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def stub(cluster: LocalCluster) -> AsyncIterator[InferenceStub]:
    async with open_channel(cluster.router_address) as channel:
        yield InferenceStub(channel)


def request(
    text: str = "import os\n", *, key: str = "", session: str = "", policy: str = "", **sampling: Any
) -> pb.GenerateRequest:
    """A request that is not soon over, with changes."""
    fields = {"max_tokens": 600, "ignore_eos": True, "seed": 1}
    return pb.GenerateRequest(
        text=text,
        idempotency_key=key,
        session_id=session,
        speculation=pb.Speculation(policy=policy),
        sampling=pb.Sampling(**(fields | sampling)),
    )


async def answered(call: Any) -> tuple[pb.Started, list[pb.Chunk], pb.Finished]:
    """A call that does not fail."""
    events = [event async for event in call]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["chunk"] * (len(events) - 2), "finished"]
    return events[0].started, [event.chunk for event in events[1:-1]], events[-1].finished


async def failed(call: Any) -> End:
    """How a call ends that fails; its iterator will do."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return end_of(error)
    raise AssertionError("it did not fail")


def text_of(chunks: list[pb.Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def tokens_of(chunks: list[pb.Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def test_a_resume_from_any_chunk_repeats_nothing_and_loses_nothing(
    stub: InferenceStub, tokenizer: Tokenizer
) -> None:
    hot = request(temperature=6.0, max_tokens=48)  # so hot that characters come in halves
    hot.speculation.policy = "off"  # for the same chunks again
    _, chunks, _ = await answered(stub.Generate(hot, timeout=TIMEOUT_S))
    hot.sampling.stop.extend(chunk.text[-1] + "\x00" for chunk in chunks[10:20] if chunk.text)  # these almost come
    started, chunks, finished = await answered(stub.Generate(hot, timeout=TIMEOUT_S))
    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert text_of(chunks) == tokenizer.decode(tokens_of(chunks))
    ahead = [
        len(tokenizer.decode(tokens_of(chunks[: number + 1]))) - chunk.text_offset
        for number, chunk in enumerate(chunks)
    ]
    assert max(ahead) > 0  # tokens run ahead of text
    position, offset = started.prompt_tokens, 0
    for number, chunk in enumerate(chunks):
        position, offset = position + len(chunk.token_ids), offset + len(chunk.text)
        assert (chunk.next_position, chunk.text_offset) == (position, offset)
        rest = pb.ResumeRequest(session_id=started.session_id, next_position=position, text_offset=offset)
        _, behind, _ = await answered(stub.Resume(rest, timeout=TIMEOUT_S))
        assert (text_of(behind), tokens_of(behind)) == (text_of(chunks[number + 1 :]), tokens_of(chunks[number + 1 :]))
    again, whole, _ = await answered(stub.Resume(pb.ResumeRequest(session_id=started.session_id), timeout=TIMEOUT_S))
    assert (text_of(whole), tokens_of(whole)) == (text_of(chunks), tokens_of(chunks))
    assert (again.seed, again.generation) == (started.seed, started.generation)


async def test_resuming_takes_a_generation_over_and_aborts_its_earlier_reader(stub: InferenceStub) -> None:
    long = request(max_tokens=600)  # so that it is not over before it is resumed
    long.speculation.policy = "off"
    first = aiter(stub.Generate(long, timeout=TIMEOUT_S))
    started = (await anext(first)).started
    chunk = (await anext(first)).chunk
    place = {"session_id": started.session_id, "generation": 1}
    second = stub.Resume(
        pb.ResumeRequest(**place, next_position=chunk.next_position, text_offset=chunk.text_offset), timeout=TIMEOUT_S
    )
    end, (_, rest, _) = await asyncio.gather(failed(first), answered(second))
    assert (end.code, end.metadata["outrider-error"]) == (grpc.StatusCode.ABORTED, "Superseded")
    _, alone, _ = await answered(stub.Generate(long, timeout=TIMEOUT_S))
    assert chunk.text + text_of(rest) == text_of(alone)


async def test_a_broken_call_stops_the_computation_and_keeps_the_generation(stub: InferenceStub, verifier: str) -> None:
    call = stub.Generate(request(max_tokens=900, policy="off"), timeout=TIMEOUT_S)
    session = (await call.read()).started.session_id
    await call.read()
    call.cancel()
    began = time.monotonic()
    steps = (await idle(verifier)).steps
    assert time.monotonic() - began < 1.0
    known = await stub.GetSession(pb.GetSessionRequest(session_id=session))
    assert (known.running, known.generation) == (True, 1)
    await asyncio.sleep(0.2)
    assert (await described(verifier)).steps <= steps + 1
    for _ in range(2):
        await stub.Cancel(pb.CancelRequest(session_id=session))
    known = await stub.GetSession(pb.GetSessionRequest(session_id=session))
    assert (known.running, known.reason) == (False, types_pb2.FINISH_REASON_CANCELLED)
    _, chunks, finished = await answered(stub.Resume(pb.ResumeRequest(session_id=session), timeout=TIMEOUT_S))
    assert finished.reason == types_pb2.FINISH_REASON_CANCELLED
    assert 0 < len(tokens_of(chunks)) < 900


async def test_a_deadline_ends_the_generation(stub: InferenceStub) -> None:
    session, timeout_s = "", 0.5  # no model makes 900 tokens in that time
    while not session:
        events = aiter(stub.Generate(request(max_tokens=900, policy="off"), timeout=timeout_s))
        with suppress(grpc.aio.AioRpcError):  # a busy machine had not begun before the deadline
            session = (await anext(events)).started.session_id
        timeout_s += 0.25
    assert (await failed(events)).code is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(5):
        while (known := await stub.GetSession(pb.GetSessionRequest(session_id=session))).running:
            await asyncio.sleep(0.02)
    assert known.reason == types_pb2.FINISH_REASON_DEADLINE


async def test_a_turn_continues_its_session_and_a_differing_history_forks(
    stub: InferenceStub, tokenizer: Tokenizer
) -> None:
    started, chunks, _ = await answered(stub.Generate(request(max_tokens=20), timeout=TIMEOUT_S))
    history = tokenizer.encode("import os\n").ids + tokens_of(chunks)
    for generation, further in ((2, [5, 6]), (3, [7])):
        ids = pb.TokenIds(ids=further if generation == 2 else history + further)
        turn = pb.GenerateRequest(
            token_ids=ids,
            session_id=started.session_id,
            whole_history=generation == 3,
            sampling=pb.Sampling(max_tokens=5, ignore_eos=True, seed=2),
        )
        again, answer, _ = await answered(stub.Generate(turn, timeout=TIMEOUT_S))
        history += further + tokens_of(answer)
        assert (again.session_id, again.generation) == (started.session_id, generation)
        assert again.prompt_tokens == len(history) - 5
        assert again.cached_tokens >= again.prompt_tokens - len(further) - 1
    turn.token_ids.ids[:] = [*history[:15], (history[15] + 1) % 4096]
    forked, _, _ = await answered(stub.Generate(turn, timeout=TIMEOUT_S))
    assert (forked.forked_from, forked.generation, forked.cached_tokens) == (started.session_id, 1, 15)
    assert forked.session_id != started.session_id
    known = await stub.GetSession(pb.GetSessionRequest(session_id=started.session_id))
    assert (known.length, known.generation) == (len(history), 3)


async def test_a_repeated_request_gets_the_first_one_s_answer_from_the_start(stub: InferenceStub) -> None:
    drawn = request(key="one key", max_tokens=40)
    drawn.sampling.ClearField("seed")  # else the answers would be the same anyway
    first = stub.Generate(drawn, timeout=TIMEOUT_S)
    session = (await first.read()).started.session_id
    await first.read()
    first.cancel()
    answers = []
    for _ in range(2):
        started, chunks, _ = await answered(stub.Generate(drawn, timeout=TIMEOUT_S))
        assert started.session_id == session
        answers.append((started.seed, text_of(chunks), tokens_of(chunks)))
    assert answers[0] == answers[1]
    assert len(answers[0][2]) == 40
    drawn.sampling.max_tokens = 41
    end = await failed(stub.Generate(drawn, timeout=TIMEOUT_S))
    assert (end.code, end.metadata["outrider-field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "idempotency_key")


def wrong(field: str) -> tuple[str, str]:
    """The trailers of a wrong field."""
    return "InvalidRequest", field


async def test_statuses_carry_advice_and_the_error_class_in_the_trailer(stub: InferenceStub) -> None:
    running = stub.Generate(request(), timeout=TIMEOUT_S)
    session = (await running.read()).started.session_id
    busy = await failed(stub.Generate(request(session=session)))  # at once: it has ended before long
    running.cancel()
    assert (busy.code, busy.metadata.get("outrider-error")) == (grpc.StatusCode.ALREADY_EXISTS, "Busy")
    started, _, _ = await answered(stub.Generate(request(max_tokens=1), timeout=TIMEOUT_S))
    over = started.session_id
    await answered(stub.Generate(request(session=over, max_tokens=1), timeout=TIMEOUT_S))
    foreign = request()
    foreign.token_ids.CopyFrom(pb.TokenIds(ids=[1], tokenizer_digest=b"x" * 16))
    code = grpc.StatusCode
    cases: list[tuple[Any, grpc.StatusCode, str, str]] = [
        (stub.Generate(request(temperature=-1)), code.INVALID_ARGUMENT, *wrong("temperature")),
        (stub.Generate(request(max_tokens=5000)), code.INVALID_ARGUMENT, "TooLong", "max_tokens"),
        (stub.Generate(request("")), code.INVALID_ARGUMENT, *wrong("prompt")),
        (stub.Generate(request(key="k" * 129)), code.INVALID_ARGUMENT, *wrong("idempotency_key")),
        (stub.Generate(pb.GenerateRequest(text="x", model="gpt")), code.NOT_FOUND, "NotFound", ""),
        (stub.Generate(foreign), code.FAILED_PRECONDITION, "TokenizerMismatch", ""),
        (stub.Generate(request(session="nobody")), code.NOT_FOUND, "NotFound", ""),
        (stub.Resume(pb.ResumeRequest(session_id="nobody")), code.NOT_FOUND, "NotFound", ""),
        (stub.Resume(pb.ResumeRequest(session_id=over, generation=3)), code.NOT_FOUND, "NotFound", ""),
        (stub.Resume(pb.ResumeRequest(session_id=over, generation=1)), code.INVALID_ARGUMENT, *wrong("generation")),
        (stub.Resume(pb.ResumeRequest(session_id=over, next_position=99)), code.OUT_OF_RANGE, "Conflict", ""),
        (
            stub.Resume(pb.ResumeRequest(session_id=over, next_position=1)),
            code.INVALID_ARGUMENT,
            *wrong("next_position"),
        ),
        (stub.Cancel(pb.CancelRequest(session_id="nobody")), code.NOT_FOUND, "NotFound", ""),
        (stub.GetSession(pb.GetSessionRequest(session_id="nobody")), code.NOT_FOUND, "NotFound", ""),
        (stub.CreateSession(pb.CreateSessionRequest(model="gpt")), code.NOT_FOUND, "NotFound", ""),
    ]
    for call, status, kind, field in cases:
        end = await failed(call)
        assert (end.code, end.metadata.get("outrider-error"), end.metadata.get("outrider-field", "")) == (
            status,
            kind,
            field,
        ), end


async def test_a_full_router_sends_a_retry_time(stub: InferenceStub, cluster: LocalCluster) -> None:
    await idle(cluster.processes["verifier-0"].address)
    calls = [stub.Generate(request(seed=number), timeout=TIMEOUT_S) for number in range(16)]
    try:
        await asyncio.gather(*(call.read() for call in calls))
        end = await failed(stub.Generate(request(), timeout=TIMEOUT_S))
        assert (end.code, end.metadata["outrider-error"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "Overloaded")
        assert int(end.metadata["retry-after-ms"]) > 0
    finally:
        for call in calls:
            call.cancel()
    await idle(cluster.processes["verifier-0"].address)
