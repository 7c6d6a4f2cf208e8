"""Sessions with several turns, hand-over between routers, and resuming: nothing repeated, nothing lost."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.config import RouterConfig
from outrider.core.session.contract import Contract
from outrider.core.session.digest import EMPTY, extend
from outrider.errors import NotFound, Unavailable
from outrider.store.sessions import Sessions, SessionTurn
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2
from router.requests.requests import parse
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import ANSWER, FOLDER, MODEL, SCRIPT, Rig, ask, collect, drain, released, running_router, until


def turn(session: str, prompt: str, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(session_id=session, text=prompt, sampling=pb.Sampling(**sampling))


def resume(session: str, position: int = 0, offset: int = 0, generation: int = 0) -> pb.ResumeRequest:
    return pb.ResumeRequest(session_id=session, next_position=position, text_offset=offset, generation=generation)


async def status(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain(call)
    return caught.value.code()


async def test_turns_of_a_session_follow_each_other_in_one_log(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest) as worker:
        session = await rig.stub.CreateSession(pb.CreateSessionRequest())
        assert (session.model, session.length, session.generation, session.running) == ("target", 0, 0, False)
        first, _, _ = await collect(rig.stub.Generate(turn(session.session_id, "a = 1\n", max_tokens=4)))
        second, _, _ = await collect(rig.stub.Generate(turn(session.session_id, "b = 2\n", max_tokens=3)))
        assert (first.session_id, second.session_id) == (session.session_id, session.session_id)
        assert (first.generation, second.generation) == (1, 2)
        log = list((await rig.sessions.read(session.session_id)).tokens)
        one, two = (MODEL.tokenizer.encode(text).ids for text in ("a = 1\n", "b = 2\n"))
        assert log == [*one, *SCRIPT[:4], *two, *SCRIPT[:3]]
        assert list(verifier.starts[1].tokens) == log[:-3]
        known = await rig.stub.GetSession(pb.GetSessionRequest(session_id=session.session_id))
        assert (known.length, known.generation, known.running, known.epoch) == (len(log), 2, False, 2)
        assert (known.reason, known.verifier) == (types_pb2.FINISH_REASON_LENGTH, worker.worker_id)


async def test_a_matching_history_continues_the_session_and_a_differing_one_forks(redis_url: str) -> None:
    verifier = FakeVerifier(MODEL.tokenizer.encode("x = 5\n").ids)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        first, chunks, _ = await collect(rig.stub.Generate(ask("a = 1\n", max_tokens=3)))
        history = "a = 1\n" + "".join(chunk.text for chunk in chunks)
        request = turn(first.session_id, history + "\nb", max_tokens=2)
        request.whole_history = True
        second, _, _ = await collect(rig.stub.Generate(request))
        assert (second.session_id, second.generation, second.forked_from) == (first.session_id, 2, "")
        for text in ("a = 2\n", "a = 2\n" + history + history):
            request = turn(first.session_id, text, max_tokens=2)
            request.whole_history = True
            fork, _, _ = await collect(rig.stub.Generate(request))
            assert fork.session_id != first.session_id
            assert (fork.generation, fork.forked_from) == (1, first.session_id)
            assert (await rig.sessions.get(first.session_id)).generation == 2
            tokens = MODEL.tokenizer.encode(text).ids
            assert list((await rig.sessions.read(fork.session_id)).tokens)[: len(tokens)] == tokens


async def test_a_session_has_one_generation_at_a_time(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=20))
        session = (await call.read()).started.session_id
        assert await status(rig.stub.Generate(turn(session, "b", max_tokens=1))) == grpc.StatusCode.ALREADY_EXISTS
        assert (await drain(call))[-1].finished.usage.completion_tokens == 20
        await collect(rig.stub.Generate(turn(session, "b", max_tokens=1)))


async def test_a_turn_of_another_model_or_an_unknown_session_is_refused(redis_url: str) -> None:
    async with running_router(redis_url) as rig, announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest):
        session = (await rig.stub.CreateSession(pb.CreateSessionRequest(model="target"))).session_id
        request = turn(session, "x", max_tokens=1)
        request.model = "gpt"
        assert await status(rig.stub.Generate(request)) == grpc.StatusCode.INVALID_ARGUMENT
        assert await status(rig.stub.Generate(turn("nobody", "x"))) == grpc.StatusCode.NOT_FOUND
        for method, message in (
            (rig.stub.CreateSession, pb.CreateSessionRequest(model="gpt")),
            (rig.stub.GetSession, pb.GetSessionRequest(session_id="nobody")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(message)
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_closing_a_session_deletes_it_and_ends_its_generation(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=50))
        session = (await call.read()).started.session_id
        reader = asyncio.create_task(drain(call))
        for _ in range(2):
            await rig.stub.CloseSession(pb.CloseSessionRequest(session_id=session))
        assert (await reader)[-1].finished.reason == types_pb2.FINISH_REASON_CANCELLED
        await until(lambda: verifier.open == 0)
        assert await status(rig.stub.Generate(turn(session, "x"))) == grpc.StatusCode.NOT_FOUND
        assert await status(rig.stub.Resume(resume(session))) == grpc.StatusCode.NOT_FOUND
        with pytest.raises(NotFound):
            await rig.sessions.read(session)


async def pieces(rig: Rig, session: str, position: int, offset: int) -> tuple[str, list[int], pb.Finished]:
    _, chunks, finished = await collect(rig.stub.Resume(resume(session, position, offset)))
    return "".join(chunk.text for chunk in chunks), [token for chunk in chunks for token in chunk.token_ids], finished


async def test_a_finished_answer_can_be_read_again_from_every_position(redis_url: str) -> None:
    """Also inside a character of several tokens, and inside what might have become a stop string."""
    async with running_router(redis_url) as rig, announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=len(SCRIPT), stop=["🙂\n and more", "zzz"]))
        started, chunks, finished = await collect(call)
        inside = 0
        for chunk in [pb.Chunk(next_position=started.prompt_tokens), *chunks]:
            text, tokens, again = await pieces(rig, started.session_id, chunk.next_position, chunk.text_offset)
            assert ANSWER[: chunk.text_offset] + text == ANSWER
            committed = chunk.next_position - started.prompt_tokens
            assert tokens == SCRIPT[committed:]
            assert (again.reason, again.usage.steps) == (finished.reason, finished.usage.steps)
            assert again.usage.completion_tokens == len(SCRIPT)
            inside += committed > 0 and MODEL.tokenizer.decode(SCRIPT[:committed]).endswith("\N{REPLACEMENT CHARACTER}")
        assert inside, "no position lies inside a character: the script is too simple"


@pytest.mark.parametrize("cut", range(1, 16, 2))
async def test_a_generation_broken_off_anywhere_continues_at_another_router(redis_url: str, cut: int) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.002, stride=2)
    async with (
        running_router(redis_url) as first,
        running_router(redis_url) as second,
        announced(verifier, first.registry, MODEL.digest),
    ):
        call = first.stub.Generate(ask(max_tokens=len(SCRIPT), stop=["🙂\n and more"], seed=3))
        started = (await call.read()).started
        text, tokens, position, offset = "", [], 0, 0
        for _ in range(cut):  # bites: the answer may have fewer parts
            chunk = (await call.read()).chunk
            if not chunk.token_ids:
                break
            text, tokens = text + chunk.text, [*tokens, *chunk.token_ids]
            position, offset = chunk.next_position, chunk.text_offset
        call.cancel()
        again, chunks, finished = await collect(second.stub.Resume(resume(started.session_id, position, offset)))
        assert (again.seed, again.generation) == (3, 1)
        assert text + "".join(chunk.text for chunk in chunks) == ANSWER
        assert tokens + [token for chunk in chunks for token in chunk.token_ids] == SCRIPT
        assert finished.reason == types_pb2.FINISH_REASON_LENGTH
        assert finished.usage.completion_tokens == len(SCRIPT)


async def test_resuming_takes_a_running_generation_over_and_its_first_reader_is_superseded(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=len(SCRIPT)))
        session = (await call.read()).started.session_id
        await call.read()
        reader = asyncio.create_task(status(call))
        text, tokens, _ = await pieces(rig, session, 0, 0)
        assert (text, tokens) == (ANSWER, SCRIPT)
        assert await reader == grpc.StatusCode.ABORTED
        await until(lambda: verifier.open == 0)


async def test_a_position_outside_the_answer_is_refused(redis_url: str) -> None:
    async with running_router(redis_url) as rig, announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest):
        started, _, _ = await collect(rig.stub.Generate(ask(max_tokens=4)))
        session = started.session_id
        assert await status(rig.stub.Resume(resume(session, 1000))) == grpc.StatusCode.OUT_OF_RANGE
        assert await status(rig.stub.Resume(resume(session, 0, 1000))) == grpc.StatusCode.INVALID_ARGUMENT
        inside = resume(session, started.prompt_tokens - 1)
        assert await status(rig.stub.Resume(inside)) == grpc.StatusCode.INVALID_ARGUMENT
        assert await status(rig.stub.Resume(resume(session, generation=2))) == grpc.StatusCode.NOT_FOUND
        await collect(rig.stub.Generate(turn(session, "b", max_tokens=1)))
        assert await status(rig.stub.Resume(resume(session, generation=1))) == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_generation_is_given_up_after_resume_ttl_and_the_session_continues(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.01)
    async with (
        running_router(redis_url, resume_ttl_s=0.3) as rig,
        announced(verifier, rig.registry, MODEL.digest),
    ):
        call = rig.stub.Generate(ask(max_tokens=50))
        session = (await call.read()).started.session_id
        await call.read()
        call.cancel()
        await released(rig, session)
        refused = rig.stub.Generate(turn(session, "b", max_tokens=1))
        assert await status(refused) == grpc.StatusCode.ALREADY_EXISTS
        await asyncio.sleep(0.4)
        assert await status(rig.stub.Resume(resume(session))) == grpc.StatusCode.NOT_FOUND
        started, _, _ = await collect(rig.stub.Generate(turn(session, "b", max_tokens=1)))
        assert started.generation == 2


async def test_a_repeated_request_with_one_key_gets_the_first_answer(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.005)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        request = ask(max_tokens=9)
        request.idempotency_key = "k1"
        broken = rig.stub.Generate(request)
        session = (await broken.read()).started.session_id
        broken.cancel()
        answers = [await collect(rig.stub.Generate(request)) for _ in range(2)]
        assert [started.session_id for started, _, _ in answers] == [session, session]
        assert len({started.seed for started, _, _ in answers}) == 1
        for _, chunks, _ in answers:
            assert [token for chunk in chunks for token in chunk.token_ids] == SCRIPT[:9]
        request.sampling.max_tokens = 8
        assert await status(rig.stub.Generate(request)) == grpc.StatusCode.INVALID_ARGUMENT
        further = turn(session, "b", max_tokens=2)
        further.idempotency_key = "k2"
        generations = [(await collect(rig.stub.Generate(further)))[0].generation for _ in range(3)]
        assert generations == [2, 2, 2]


async def test_an_idempotency_key_whose_first_request_never_began_is_usable(redis_url: str) -> None:
    async with running_router(redis_url) as rig, announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest):
        request = ask(max_tokens=3)
        request.idempotency_key = "k"
        config = RouterConfig(models={"target": FOLDER})
        fingerprint = parse(request, {"target": MODEL}, config).fingerprint
        await rig.sessions.claim("", "k", fingerprint, "f" * 32 + "/1")
        started, _, _ = await collect(rig.stub.Generate(request))
        assert started.session_id == "f" * 32


async def test_a_refused_turns_key_does_not_return_another_turns_answer(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=6))
        session = (await call.read()).started.session_id
        refused = turn(session, "b", max_tokens=2)
        refused.idempotency_key = "k"
        assert await status(rig.stub.Generate(refused)) == grpc.StatusCode.ALREADY_EXISTS
        await drain(call)
        other = turn(session, "c = 3\n", max_tokens=3)
        other.idempotency_key = "j"
        await collect(rig.stub.Generate(other))
        started, chunks, _ = await collect(rig.stub.Generate(refused))
        assert (started.generation, sum(len(chunk.token_ids) for chunk in chunks)) == (3, 2)
        assert await status(rig.stub.Generate(other)) == grpc.StatusCode.INVALID_ARGUMENT
        again, _, _ = await collect(rig.stub.Generate(refused))
        assert again.generation == 3


async def test_cancel_works_through_any_router(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)
    async with (
        running_router(redis_url) as first,
        running_router(redis_url) as second,
        announced(verifier, first.registry, MODEL.digest),
    ):
        call = first.stub.Generate(ask(max_tokens=50))
        session = (await call.read()).started.session_id
        reader = asyncio.create_task(drain(call))
        await second.stub.Cancel(pb.CancelRequest(session_id=session))
        events = await reader
        assert events[-1].finished.reason == types_pb2.FINISH_REASON_CANCELLED
        await until(lambda: verifier.open == 0)
        assert (await first.sessions.get(session)).finished == "cancelled"


async def test_an_owner_that_waits_renews_its_lease(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=1.5)
    async with running_router(redis_url, lease_s=0.6) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=2))
        session = (await call.read()).started.session_id
        await asyncio.sleep(1.2)
        assert (await rig.sessions.get(session)).lease > time.time()
        assert verifier.heartbeats >= 3
        await drain(call)


async def test_a_deadline_holds_for_a_resumed_generation(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.05)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=50), timeout=2.0)
        session = (await call.read()).started.session_id
        await call.read()
        call.cancel()
        await released(rig, session)
        _, chunks, finished = await collect(rig.stub.Resume(resume(session)))
        assert finished.reason == types_pb2.FINISH_REASON_DEADLINE
        assert 1 <= sum(len(chunk.token_ids) for chunk in chunks) < 50


async def test_log_probabilities_are_logged_and_replayed(redis_url: str) -> None:
    async with running_router(redis_url) as rig, announced(FakeVerifier(SCRIPT, stride=3), rig.registry, MODEL.digest):
        started, chunks, _ = await collect(rig.stub.Generate(ask(max_tokens=7, logprobs=0)))
        assert [entry.logprob for chunk in chunks for entry in chunk.logprobs] == [-float(at) for at in range(7)]
        _, again, _ = await collect(rig.stub.Resume(resume(started.session_id, started.prompt_tokens + 2)))
        assert [entry.logprob for chunk in again for entry in chunk.logprobs] == [-2.0, -3.0, -4.0, -5.0, -6.0]


async def test_a_client_that_does_not_read_loses_its_slot_and_gets_it_back(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from router.api import running_calls
    from router.sessions import outbox

    monkeypatch.setattr(outbox, "SLOW_CLIENT_S", 0.3)
    verifier = FakeVerifier(SCRIPT)
    async with running_router(redis_url, window=1) as rig, announced(verifier, rig.registry, MODEL.digest):
        # gRPC buffers small messages well, so the reader is slow in the router's own eyes: its writes are held back.
        real, writes = running_calls._send, 0

        async def slowly(*arguments: Any) -> None:
            nonlocal writes
            writes += 1
            if writes > 3:
                await asyncio.sleep(60)
            await real(*arguments)

        monkeypatch.setattr(running_calls, "_send", slowly)
        call = rig.stub.Generate(ask(max_tokens=len(SCRIPT)))
        session = (await call.read()).started.session_id
        events: list[pb.GenerateResponse] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(call, events)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await released(rig, session)
        await until(lambda: verifier.open == 0)
        assert len(events) == 2
        monkeypatch.setattr(running_calls, "_send", real)
        last = events[-1].chunk
        text, _, _ = await pieces(rig, session, last.next_position, last.text_offset)
        assert ANSWER[: last.text_offset] + text == ANSWER


@pytest.mark.parametrize("ended", [False, True])
async def test_an_owners_last_writes_before_a_takeover_count(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    verifier, prompt = FakeVerifier(SCRIPT), MODEL.tokenizer.encode("import os\n").ids
    acquire = Sessions.acquire
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest) as worker:
        await rig.sessions.create("s", "", "target", MODEL.digest)
        terms = SessionTurn(Contract(seed=1, max_tokens=len(SCRIPT)), (), len(prompt), None)
        owned = await rig.sessions.begin("s", 0, "owner", terms, 0, prompt, extend(EMPTY, prompt))
        await owned.append(len(prompt), SCRIPT[:2], extend(EMPTY, prompt + SCRIPT[:2]), origin=worker.origin)

        async def late(sessions: Sessions, *arguments: Any) -> Any:
            await owned.append(len(prompt) + 2, SCRIPT[2:5], extend(EMPTY, prompt + SCRIPT[:5]))
            if ended:
                await owned.finish("cancelled", "")
            return await acquire(sessions, *arguments)

        monkeypatch.setattr(Sessions, "acquire", late)
        _, chunks, finished = await collect(rig.stub.Resume(resume("s")))
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == (SCRIPT[:5] if ended else SCRIPT)
        assert finished.reason == (types_pb2.FINISH_REASON_CANCELLED if ended else types_pb2.FINISH_REASON_LENGTH)
        assert "".join(chunk.text for chunk in chunks) == MODEL.tokenizer.decode(tokens)
        assert [len(start.tokens) - len(prompt) for start in verifier.starts] == ([] if ended else [5])
        await released(rig, "s")


async def test_a_take_over_that_fails_leaves_no_lease(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, read = FakeVerifier(SCRIPT, pace_s=0.01), Sessions.read
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        call = rig.stub.Generate(ask(max_tokens=len(SCRIPT)))
        session = (await call.read()).started.session_id
        await call.read()
        call.cancel()
        await released(rig, session)

        async def away(sessions: Sessions, session_id: str, start: int = 0) -> Any:
            if (await sessions.get(session_id)).lease:  # it has just been taken over
                raise Unavailable("Redis went away")
            return await read(sessions, session_id, start)

        monkeypatch.setattr(Sessions, "read", away)
        assert await status(rig.stub.Resume(resume(session))) == grpc.StatusCode.UNAVAILABLE
        await released(rig, session)
        monkeypatch.undo()
        _, chunks, _ = await collect(rig.stub.Resume(resume(session)))
        assert "".join(chunk.text for chunk in chunks) == ANSWER


@pytest.mark.parametrize("elsewhere", [False, True], ids=["its-router", "another-router"])
async def test_a_cancel_that_discards_leaves_a_session_whose_next_turn_follows_the_prompt(
    redis_url: str, elsewhere: bool
) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)
    async with (
        running_router(redis_url) as one,
        running_router(redis_url) as two,
        announced(verifier, one.registry, MODEL.digest),
    ):
        call = one.stub.Generate(ask(max_tokens=len(SCRIPT)))
        session = (await call.read()).started.session_id
        await call.read()
        cancel = pb.CancelRequest(session_id=session, discard=True)
        for _ in range(2):  # the second finds that it has ended
            await (two if elsewhere else one).stub.Cancel(cancel)
        record, prompt = await one.sessions.get(session), verifier.starts[0].tokens
        log = await one.sessions.read(session)
        assert (list(log.tokens), log.finished) == (list(prompt), "cancelled")
        assert (record.length, record.digest) == (len(prompt), extend(EMPTY, prompt))
        request = ask("b", max_tokens=4)
        request.session_id = session
        verifier.pace_s = 0
        started, chunks, _ = await collect(two.stub.Generate(request))
        assert [token for chunk in chunks for token in chunk.token_ids] == SCRIPT[:4]
        assert started.session_id == session
        assert list(verifier.starts[-1].tokens[: len(prompt)]) == list(prompt)


async def test_an_answer_that_has_ended_is_not_discarded(redis_url: str) -> None:
    async with running_router(redis_url) as rig, announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest):
        started, _, _ = await collect(rig.stub.Generate(ask(max_tokens=4)))
        await rig.stub.Cancel(pb.CancelRequest(session_id=started.session_id, discard=True))
        assert list((await rig.sessions.read(started.session_id)).tokens[-4:]) == SCRIPT[:4]
