"""Session ids that were forged, or are another tenant's: nothing is read, and both get equal answers."""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from collections import Counter
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.store.api_keys import Keys
from outrider.v1 import inference_pb2 as pb
from tests.hostile.rig import watched
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, Rig, ask, collect, drain, running_router

ABREAST = 50  # tries at a time
SECRET = "the answer is forty-two"
TRIES = [
    pytest.param(3_000, id="3000"),
    pytest.param(100_000, id="100000", marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
]

Metadata = tuple[tuple[str, str], ...]


def requests(session_id: str) -> dict[str, Any]:
    """All requests about a session, by method."""
    return {
        "Generate": pb.GenerateRequest(session_id=session_id, text="go on", sampling=pb.Sampling(max_tokens=1)),
        "Resume": pb.ResumeRequest(session_id=session_id, generation=1),
        "Cancel": pb.CancelRequest(session_id=session_id),
        "GetSession": pb.GetSessionRequest(session_id=session_id),
        "CloseSession": pb.CloseSessionRequest(session_id=session_id),
        "Watch": pb.WatchSessionRequest(session_id=session_id),
    }


def forged(draw: random.Random, real: list[str]) -> str:
    """An id that an attacker might try: another tenant's own, one near it, a key of Redis, or any."""
    one = draw.choice(real)
    place = draw.randrange(len(one))
    return (
        draw.choice(
            [
                one,
                one,
                one[:place] + draw.choice("0123456789abcdef") + one[place + 1 :],
                one.upper(),
                one[:place],
                one + draw.choice("\0 0*é}"),
                f"{{{one}}}:session",
                f"outrider:{{{one}}}:log",
                "*",
                "{keys}",
                "{tickets}:keys",
                f"idempotency:{one}",
                f"{draw.getrandbits(128):032x}",
                f"{draw.getrandbits(128):032x}",
                "x" * draw.randrange(1, 400),
            ]
        )
        or "0"
    )  # the empty one asks for a new session


async def seen(rig: Rig, method: str, session_id: str, metadata: Metadata) -> tuple[Any, ...]:
    """All that a caller can see of an answer, but for the id that the caller sent."""
    call = getattr(rig.stub, method)(requests(session_id)[method], metadata=metadata, timeout=60)
    try:
        answer = await drain(call) if hasattr(call, "read") else await call
    except grpc.aio.AioRpcError as error:
        details = (error.details() or "").replace(f"session {session_id} ", "session ID ")
        return error.code().name, details, tuple(error.trailing_metadata() or ())
    return "OK", str(answer), tuple(await call.trailing_metadata())


@pytest.mark.parametrize("tries", TRIES)
async def test_forged_session_ids_read_nothing_and_get_equal_answers(redis_url: str, tries: int) -> None:
    draw = random.Random(1)
    verifier = FakeVerifier(SCRIPT, pace_s=0.05)
    async with (
        watched(),
        running_router(redis_url, auth="keys") as rig,
        announced(verifier, rig.registry, MODEL.digest),
    ):
        keys = Keys(rig.client)
        mine, foreign = [(("authorization", f"Bearer {(await keys.add(tenant))[0]}"),) for tenant in ("owner", "thief")]
        real = []
        for _ in range(4):
            started, _, _ = await collect(rig.stub.Generate(ask(SECRET, max_tokens=2), metadata=mine))
            real.append(started.session_id)
        running = rig.stub.Generate(ask(SECRET, max_tokens=40), metadata=mine)
        real.append((await running.read()).started.session_id)
        real.append((await rig.stub.CreateSession(pb.CreateSessionRequest(), metadata=mine)).session_id)
        records = [await rig.sessions.get(session_id) for session_id in real[:4]]
        steps, starts = await finished_steps(running, verifier)

        answers: dict[str, Counter[tuple[Any, ...]]] = {}
        for begin in range(0, tries, ABREAST):
            tried = [
                (draw.choice(sorted(requests(""))), forged(draw, real)) for _ in range(min(ABREAST, tries - begin))
            ]
            outcomes = await asyncio.gather(*(seen(rig, method, one, foreign) for method, one in tried))
            for (method, _), outcome in zip(tried, outcomes, strict=True):
                answers.setdefault(method, Counter())[outcome] += 1

        assert set(answers) == set(requests(""))
        for method, kinds in answers.items():
            assert len(kinds) == 1, (method, kinds)
            ((status, text, _),) = kinds
            assert status == ("OK" if method == "CloseSession" else "NOT_FOUND"), method
            assert SECRET not in text
        assert [await rig.sessions.get(session_id) for session_id in real[:4]] == records
        assert (verifier.steps, len(verifier.starts)) == (steps, starts)
        assert (await rig.stub.GetSession(pb.GetSessionRequest(session_id=real[4]), metadata=mine)).length > 40


async def finished_steps(running: Any, verifier: FakeVerifier) -> tuple[int, int]:
    """Steps and starts once the generation has ended."""
    assert (await drain(running))[-1].HasField("finished")
    return verifier.steps, len(verifier.starts)


@pytest.mark.long  # a measurement: it wants a quiet machine
async def test_refusals_take_equally_long_for_foreign_and_unknown_sessions(redis_url: str) -> None:
    async with running_router(redis_url, auth="keys") as rig:
        async with announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest):
            keys = Keys(rig.client)
            mine, foreign = [
                (("authorization", f"Bearer {(await keys.add(tenant))[0]}"),) for tenant in ("owner", "thief")
            ]
            started, _, _ = await collect(rig.stub.Generate(ask(SECRET, max_tokens=2), metadata=mine))
            took: dict[bool, list[float]] = {True: [], False: []}
            for number in range(1500):
                there = number % 2 == 0
                session_id = started.session_id if there else secrets.token_hex(16)
                begin = time.perf_counter()
                await seen(rig, "GetSession", session_id, foreign)
                took[there].append(time.perf_counter() - begin)
        foreign_s, absent_s = (statistics.median(took[there]) for there in (True, False))
        print(f"median: foreign {foreign_s * 1e6:.0f} us, absent {absent_s * 1e6:.0f} us")
        assert abs(foreign_s - absent_s) < 0.1 * absent_s
