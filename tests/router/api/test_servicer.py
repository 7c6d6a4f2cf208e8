"""The router as its clients see it: real gRPC, a real Redis, and a verifier that commits a script."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.store.sessions import OwnedSession
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2
from tests.router.fakes import CONTEXT, FakeDrafter, FakeVerifier, announced
from tests.router.rig import (
    ANSWER,
    MODEL,
    SCRIPT,
    Restartable,
    ask,
    collect,
    drain,
    finished_reason,
    released,
    running_router,
    until,
)


async def test_a_generation_streams_text_tokens_and_figures_and_is_durable(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, stride=3)
    async with running_router(redis_url, window=4) as rig, announced(verifier, rig.registry, MODEL.digest):
        request = ask(max_tokens=len(SCRIPT), seed=7)
        started, chunks, finished = await collect(rig.stub.Generate(request))
        prompt = MODEL.tokenizer.encode("import os\n").ids
        assert (started.seed, started.model, started.prompt_tokens) == (7, "target", len(prompt))
        assert "".join(chunk.text for chunk in chunks) == ANSWER
        assert [token for chunk in chunks for token in chunk.token_ids] == SCRIPT
        assert all(len(chunk.gaps) == len(chunk.token_ids) for chunk in chunks)
        assert chunks[-1].next_position == len(prompt) + len(SCRIPT)
        assert chunks[-1].text_offset == len(ANSWER)
        assert finished.reason == types_pb2.FINISH_REASON_LENGTH
        usage = finished.usage
        steps = -(-len(SCRIPT) // 3)
        assert (usage.prompt_tokens, usage.completion_tokens, usage.steps) == (len(prompt), len(SCRIPT), steps)
        assert (usage.verified, usage.wire_bytes) == (4 * steps, 10 * steps)
        assert list(usage.tried_by_depth) == [steps] * 4
        assert usage.accepted == sum(usage.reached_by_depth)
        assert 0 < usage.first_token_us <= usage.first_token_us + usage.decode_us <= usage.total_us
        assert verifier.starts[0].epoch == 1
        assert verifier.durable[started.session_id] > chunks[-1].next_position - 3 - 4
        log = await rig.sessions.read(started.session_id)
        assert (list(log.tokens), log.finished) == (prompt + SCRIPT, "length")
        record = await rig.sessions.get(started.session_id)
        assert (record.epoch, record.length, record.finished) == (1, len(log.tokens), "length")
        assert record.turn is not None
        assert record.turn.deadline is None


class InStep(FakeVerifier):
    """It waits for each acknowledgement, so that on a busy machine no two parts of its text become durable together."""

    async def rest(self) -> None:
        while self.steps - 2 * len(self.acknowledged) >= 2:
            await asyncio.sleep(0.001)


async def test_the_verifier_receives_the_durable_position_several_times_a_window(redis_url: str) -> None:
    verifier = InStep(SCRIPT)
    async with running_router(redis_url, window=8) as rig, announced(verifier, rig.registry, MODEL.digest):
        started, _, _ = await collect(rig.stub.Generate(ask(max_tokens=41)))
        positions = [started.prompt_tokens, *verifier.acknowledged]
        assert {after - before for before, after in pairwise(positions)} == {2}
        assert len(positions) > 10  # the end of the call may overtake the last one


async def test_an_answer_of_any_length_ends_where_the_context_does(redis_url: str) -> None:
    async with running_router(redis_url) as rig, announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest):
        started, chunks, finished = await collect(rig.stub.Generate(ask(max_tokens=0)))
        room = CONTEXT - started.prompt_tokens
        assert sum(len(chunk.token_ids) for chunk in chunks) == finished.usage.completion_tokens == room
        assert finished.reason == types_pb2.FINISH_REASON_LENGTH


async def test_the_router_draws_a_seed_for_a_request_without_one(redis_url: str) -> None:
    async with running_router(redis_url) as rig, announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest):
        seeds = {(await collect(rig.stub.Generate(ask(max_tokens=1))))[0].seed for _ in range(3)}
        assert len(seeds) == 3


async def test_a_stop_string_ends_the_text_the_log_and_the_verifiers_work(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, stride=4)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=40, stop=["rn x +", "never"]))
        started, chunks, finished = await collect(call)
        assert "".join(chunk.text for chunk in chunks) == ANSWER[: ANSWER.index("rn x +")]
        assert finished.reason == types_pb2.FINISH_REASON_STOP
        await until(lambda: verifier.open == 0)
        log = await rig.sessions.read(started.session_id)
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert list(log.tokens[started.prompt_tokens :]) == tokens
        assert "rn x +" in MODEL.tokenizer.decode(tokens)
        assert "rn x +" not in MODEL.tokenizer.decode(tokens[:-1])


async def test_a_stop_string_within_the_first_tokens_counts_for_nothing(redis_url: str) -> None:
    async with running_router(redis_url) as rig, announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=len(SCRIPT), stop=[ANSWER[:3], ANSWER[-8:-4]], min_tokens=4))
        _, chunks, finished = await collect(call)
        assert "".join(chunk.text for chunk in chunks) == ANSWER[:-8]
        assert finished.reason == types_pb2.FINISH_REASON_STOP


async def test_no_token_is_sent_or_acknowledged_before_it_is_in_the_log(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, written = OwnedSession.append, asyncio.Event()

    async def late(*arguments: Any, **more: Any) -> int:
        await written.wait()
        return await append(*arguments, **more)

    monkeypatch.setattr(OwnedSession, "append", late)
    verifier = FakeVerifier(SCRIPT)
    async with running_router(redis_url, window=4) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=len(SCRIPT)))
        assert (await call.read()).HasField("started")
        reading = asyncio.ensure_future(call.read())
        await until(lambda: verifier.steps == 4)
        await asyncio.sleep(0.1)
        assert not reading.done()
        assert (verifier.steps, verifier.acknowledged) == (4, [])
        written.set()
        events = [await reading, *await drain(call)]
        assert "".join(event.chunk.text for event in events[:-1]) == ANSWER


async def test_the_end_of_text_token_stops_unless_it_is_ignored_and_has_no_text(redis_url: str) -> None:
    script = [*SCRIPT[:4], 0, *SCRIPT[4:]]
    async with running_router(redis_url) as rig, announced(FakeVerifier(script), rig.registry, MODEL.digest):
        _, chunks, finished = await collect(rig.stub.Generate(ask(max_tokens=len(script))))
        assert finished.reason == types_pb2.FINISH_REASON_STOP
        assert finished.usage.completion_tokens == 5
        assert "".join(chunk.text for chunk in chunks) == MODEL.tokenizer.decode(SCRIPT[:4])
        call = rig.stub.Generate(ask(max_tokens=len(script), ignore_eos=True))
        _, chunks, finished = await collect(call)
        assert finished.reason == types_pb2.FINISH_REASON_LENGTH
        assert "".join(chunk.text for chunk in chunks) == ANSWER


async def test_held_back_text_is_sent_at_the_end(redis_url: str) -> None:
    async with running_router(redis_url) as rig, announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=len(SCRIPT), stop=["🙂\n and more"]))
        _, chunks, _ = await collect(call)
        assert "".join(chunk.text for chunk in chunks) == ANSWER
        assert not chunks[-1].token_ids
        assert chunks[-1].text == "🙂\n"


BAD = [
    (pb.GenerateRequest(), "INVALID_ARGUMENT", "prompt: is empty"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "INVALID_ARGUMENT", "prompt: is empty"),
    (pb.GenerateRequest(model="gpt", text="x"), "NOT_FOUND", "there are: target"),
    (ask(max_tokens=0, min_tokens=CONTEXT), "INVALID_ARGUMENT", "min_tokens"),
    (ask("x " * CONTEXT, max_tokens=0), "INVALID_ARGUMENT", "prompt: has"),
    (ask(max_tokens=CONTEXT), "INVALID_ARGUMENT", "max_tokens: is 64, must be at most"),
    (ask("x " * CONTEXT), "INVALID_ARGUMENT", "prompt: has"),
    (ask(temperature=-1), "INVALID_ARGUMENT", "temperature: is -1.0"),
    (ask(temperature=float("nan")), "INVALID_ARGUMENT", "temperature: is nan"),
    (ask(top_p=0), "INVALID_ARGUMENT", "top_p: is 0.0"),
    (ask(top_k=2**32 - 1), "INVALID_ARGUMENT", "top_k"),
    (ask(stop=[""]), "INVALID_ARGUMENT", r"stop\[0\]: has 0 characters"),
    (ask(stop=["a", "b" * 257]), "INVALID_ARGUMENT", r"stop\[1\]: has 257 characters"),
    (ask(stop=["a"] * 17), "INVALID_ARGUMENT", "stop: has 17 strings"),
    (pb.GenerateRequest(text="x", speculation=pb.Speculation(policy="best")), "INVALID_ARGUMENT", "policy"),
    (pb.GenerateRequest(text="x", speculation=pb.Speculation(depth=65)), "INVALID_ARGUMENT", "depth: is 65"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[4096])), "INVALID_ARGUMENT", "4096 is outside the vocabulary"),
    (
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1], tokenizer_digest=b"other")),
        "FAILED_PRECONDITION",
        "token_ids.tokenizer_digest",
    ),
]


async def test_bad_input_names_the_field_and_its_range_and_leaves_nothing(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        for request, code, text in BAD:
            with pytest.raises(grpc.aio.AioRpcError, match=text) as caught:
                await collect(rig.stub.Generate(request))
            assert caught.value.code().name == code, request
        assert verifier.starts == []
        assert not [key for key in await rig.client.keys("*") if b":session" in key]
        await collect(rig.stub.Generate(ask(max_tokens=2)))


async def test_a_missing_or_unfit_verifier_is_named_in_the_status(redis_url: str) -> None:
    async with running_router(redis_url) as rig:
        with pytest.raises(grpc.aio.AioRpcError, match="no verifier serves model 'target'") as caught:
            await collect(rig.stub.Generate(ask()))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        async with announced(FakeVerifier(SCRIPT), rig.registry, b"another tokenizer"):
            with pytest.raises(grpc.aio.AioRpcError, match=r"tokenizer\.json") as caught:
                await collect(rig.stub.Generate(ask()))
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_too_many_sessions_are_refused_with_a_retry_delay(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=10)
    async with (
        running_router(redis_url, max_sessions=1, queue=0) as rig,
        announced(verifier, rig.registry, MODEL.digest),
    ):
        first = rig.stub.Generate(ask(max_tokens=2))
        await first.read()
        with pytest.raises(grpc.aio.AioRpcError, match="no slot is free") as caught:
            await collect(rig.stub.Generate(ask()))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 1000 <= int(dict(caught.value.trailing_metadata() or ())["retry-after-ms"]) <= 1500
        first.cancel()
        await until(lambda: verifier.open == 0)


async def test_cancel_finishes_the_stream_and_stops_the_verifier(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.01)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=50))
        session_id = (await call.read()).started.session_id
        await call.read()
        reader = asyncio.create_task(drain(call))
        await rig.stub.Cancel(pb.CancelRequest(session_id=session_id))
        events = await reader
        assert events[-1].finished.reason == types_pb2.FINISH_REASON_CANCELLED
        await until(lambda: verifier.open == 0)
        steps = verifier.steps
        await asyncio.sleep(0.05)
        assert verifier.steps == steps
        assert (await rig.sessions.read(session_id)).finished == "cancelled"
        await rig.stub.Cancel(pb.CancelRequest(session_id=session_id))  # again: it has ended already
        with pytest.raises(grpc.aio.AioRpcError, match="does not exist") as caught:
            await rig.stub.Cancel(pb.CancelRequest(session_id="nobody"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_client_that_disconnects_stops_the_verifier_and_can_resume(
    redis_url: str,
) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.01)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=50))
        session_id = (await call.read()).started.session_id
        await call.read()
        call.cancel()
        await until(lambda: verifier.open == 0, within_s=0.5)
        await released(rig, session_id)
        assert not (await rig.sessions.get(session_id)).finished


async def test_a_deadline_ends_the_call_and_is_stored_absolute(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.1)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        deadline = time.time() + 3.0
        call = rig.stub.Generate(ask(max_tokens=50), timeout=3.0)
        session_id = (await call.read()).started.session_id
        turn = (await rig.sessions.get(session_id)).turn
        assert turn is not None
        assert turn.deadline == pytest.approx(deadline, abs=1.5)
        verifier.pace_s = 10
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(call)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: verifier.open == 0, within_s=0.5)
        assert await finished_reason(rig, session_id) == "deadline"


async def test_a_router_that_lost_the_session_stops_at_once(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=50))
        session_id = (await call.read()).started.session_id
        await rig.sessions.acquire(session_id, 1, "another router")
        with pytest.raises(grpc.aio.AioRpcError, match="belongs to another router since epoch 2") as caught:
            await drain(call)
        assert caught.value.code() == grpc.StatusCode.ABORTED
        await until(lambda: verifier.open == 0, within_s=0.5)
        assert not (await rig.sessions.get(session_id)).finished  # it is the other one's to finish


async def test_speculation_off_attaches_no_drafter_and_the_plan_has_depth_0(redis_url: str) -> None:
    verifier, drafter = FakeVerifier(SCRIPT), FakeDrafter()
    async with (
        running_router(redis_url) as rig,
        announced(verifier, rig.registry, MODEL.digest),
        announced(drafter, rig.registry, MODEL.digest),
    ):
        request = ask(max_tokens=20)
        request.speculation.policy = "off"
        await collect(rig.stub.Generate(request))
        assert verifier.starts[0].plan.depth == 0
        assert drafter.asked == 0


async def test_plans_follow_acceptance(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)  # nothing is ever accepted
    async with (
        running_router(redis_url, window=2, policy="ema") as rig,
        announced(verifier, rig.registry, MODEL.digest),
    ):
        started, _, _ = await collect(rig.stub.Generate(ask("x", max_tokens=CONTEXT - 1)))
        first = verifier.starts[0].plan
        assert first.depth == 24
        assert verifier.plans[-1].depth < 24
        assert verifier.plans[-1].version > first.version
        assert (await rig.sessions.get(started.session_id)).plan.depth < 24


async def test_models_are_listed_while_a_verifier_serves_them(redis_url: str) -> None:
    async with running_router(redis_url) as rig:
        assert not (await rig.stub.ListModels(pb.ListModelsRequest())).models
        async with (
            announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest),
            announced(FakeDrafter(), rig.registry, MODEL.digest, model="small"),
        ):
            models = (await rig.stub.ListModels(pb.ListModelsRequest())).models
        assert models == [
            pb.Model(
                name="target",
                context=CONTEXT,
                vocabulary=4096,
                tokenizer_digest=MODEL.digest,
                verifiers=1,
                drafters=1,
            )
        ]


async def test_a_redis_outage_pauses_generations_at_the_window_and_loses_no_token(
    tmp_path: Path,
) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.01)
    stack = AsyncExitStack()
    async with stack:
        server = Restartable(tmp_path)
        stack.callback(server.stop)
        rig = await stack.enter_async_context(running_router(server.url, window=4, lease_s=1.0))
        await stack.enter_async_context(announced(verifier, rig.registry, MODEL.digest))
        call = rig.stub.Generate(ask(max_tokens=len(SCRIPT)))
        started = (await call.read()).started
        first = (await call.read()).chunk
        server.kill()
        await asyncio.sleep(0.7)
        steps = verifier.steps
        await asyncio.sleep(0.7)
        assert (verifier.steps, verifier.open) == (steps, 1)  # it waits at the window, and gets the router's heartbeats
        assert verifier.heartbeats
        with pytest.raises(grpc.aio.AioRpcError, match="Redis") as caught:
            await drain(rig.stub.Generate(ask(max_tokens=50)))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        server.start()
        events = await drain(call)
        text = first.text + "".join(event.chunk.text for event in events[:-1])
        assert (text, events[-1].finished.reason) == (ANSWER, types_pb2.FINISH_REASON_LENGTH)
        log = await rig.sessions.read(started.session_id)
        assert list(log.tokens[started.prompt_tokens :]) == SCRIPT


@pytest.mark.parametrize("lost", ["everything", "the tail"])
async def test_a_redis_that_returns_with_fewer_tokens_is_restored_under_a_higher_epoch(
    redis_url: str, lost: str
) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=len(SCRIPT), logprobs=0))
        started = (await call.read()).started
        keys = [key async for key in rig.client.scan_iter(f"*{started.session_id}*")]
        before = {key: await rig.client.dump(key) for key in keys}
        for _ in range(5):
            await call.read()
        if lost == "everything":
            await rig.client.delete(*keys)
        else:
            for key, value in before.items():
                await rig.client.restore(key, 0, value, replace=True)
        events = await drain(call)
        assert events[-1].finished.usage.completion_tokens == len(SCRIPT)
        log = await rig.sessions.read(started.session_id)
        assert list(log.tokens[started.prompt_tokens :]) == SCRIPT
        assert log.logprobs == b"".join(struct.pack("<f", -index) for index in range(len(SCRIPT)))
        record = await rig.sessions.get(started.session_id)
        assert (record.epoch, record.finished, record.length) == (2, "length", len(log.tokens))


async def test_many_broken_calls_leave_nothing(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    verifier, drafter = FakeVerifier(SCRIPT, pace_s=0.005), FakeDrafter()
    async with (
        running_router(redis_url) as rig,
        announced(verifier, rig.registry, MODEL.digest),
        announced(drafter, rig.registry, MODEL.digest),
    ):
        await collect(rig.stub.Generate(ask(max_tokens=2)))
        tasks = len(asyncio.all_tasks())

        async def break_off(delay: float) -> None:
            call = rig.stub.Generate(ask(max_tokens=50))
            await asyncio.sleep(delay)
            call.cancel()

        await asyncio.gather(*(break_off(index * 0.001) for index in range(100)))
        await until(lambda: verifier.open == 0 and not drafter.attached)
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        await collect(rig.stub.Generate(ask(max_tokens=2)))
