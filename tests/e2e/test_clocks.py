"""Redis' time decides: servers whose clocks differ by minutes serve, draft, fail over and end in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from outrider.rpc.channels import open_channel
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.inference_pb2_grpc import InferenceStub
from tests.altered import Server, altered
from tests.e2e.conftest import MODELS
from tests.e2e.test_faults import free_port
from tests.router.rig import drain

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

AHEAD_S = 75.0
MODEL = MODELS / "target"
ROUTER = ("router", "--model", f"target={MODEL}")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def redis(redis_server: object) -> str:
    return redis_server.url  # type: ignore[attr-defined,no-any-return]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def routers(redis: str) -> AsyncIterator[dict[float, Server]]:
    """Routers by how far their clocks are ahead, beside a verifier that is ahead and a drafter that is behind."""
    pages = {skew_s: f"127.0.0.1:{free_port()}" for skew_s in (AHEAD_S, -AHEAD_S)}
    verifier = ("verifier", "--model", str(MODEL), "--name", "target", "--dtype", "float32")
    drafter = ("drafter", "--model", str(MODELS / "drafter"), "--dtype", "float32")
    async with (
        altered(redis, *verifier, skew_s=AHEAD_S),
        altered(redis, *drafter, skew_s=-AHEAD_S),
        altered(redis, *ROUTER, "--metrics", pages[AHEAD_S], "--overlap", skew_s=AHEAD_S) as ahead,
        altered(redis, *ROUTER, "--metrics", pages[-AHEAD_S], "--overlap", skew_s=-AHEAD_S) as behind,
    ):
        await asyncio.sleep(1.5)  # until heartbeats have listed the workers
        for skew_s, page in pages.items():
            async with httpx.AsyncClient() as client:
                text = (await client.get(f"http://{page}/metrics")).text
            (line,) = [line for line in text.splitlines() if line.startswith("outrider_clock_skew_seconds")]
            assert float(line.split()[-1]) == pytest.approx(skew_s, abs=0.5)
        yield {AHEAD_S: ahead, -AHEAD_S: behind}


def asked(max_tokens: int) -> pb.GenerateRequest:
    sampling = pb.Sampling(max_tokens=max_tokens, seed=3, temperature=0.6, ignore_eos=True)
    return pb.GenerateRequest(text="def add(a, b):\n", sampling=sampling)


def tokens(events: list[pb.GenerateResponse]) -> list[int]:
    return [token for event in events for token in event.chunk.token_ids]


@pytest.mark.parametrize("skew_s", [AHEAD_S, -AHEAD_S])
async def test_a_router_of_either_clock_speculates(routers: dict[float, Server], skew_s: float) -> None:
    async with open_channel(routers[skew_s].address) as channel:
        events = await drain(InferenceStub(channel).Generate(asked(200)))
    assert events[-1].finished.usage.accepted > 0  # its tickets count at the verifier


@pytest.mark.parametrize("skew_s", [AHEAD_S, -AHEAD_S], ids=["begun-ahead", "begun-behind"])
async def test_a_generation_fails_over_to_a_router_of_another_time(
    routers: dict[float, Server], redis: str, skew_s: float
) -> None:
    async with open_channel(routers[-skew_s].address) as channel, altered(redis, *ROUTER, skew_s=skew_s) as dying:
        other = InferenceStub(channel)
        whole = tokens(await drain(other.Generate(asked(400))))
        async with open_channel(dying.address) as first:
            call = InferenceStub(first).Generate(asked(400), timeout=60)
            begun = [await call.read() for _ in range(3)]
            await dying.kill()
            with pytest.raises(grpc.aio.AioRpcError):
                await drain(call, begun)
        session = begun[0].started.session_id
        position = max(event.chunk.next_position for event in begun)
        events = await drain(other.Resume(pb.ResumeRequest(session_id=session, next_position=position)))
        assert events[-1].finished.reason == types_pb2.FINISH_REASON_LENGTH
        assert tokens(begun) + tokens(events) == whole


@pytest.mark.parametrize("skew_s", [AHEAD_S, -AHEAD_S], ids=["begun-ahead", "begun-behind"])
async def test_a_deadline_ends_a_generation_in_time_at_either_router(
    routers: dict[float, Server], skew_s: float
) -> None:
    async with (
        open_channel(routers[skew_s].address) as first,
        open_channel(routers[-skew_s].address) as second,
    ):
        begun_at = time.monotonic()
        call = InferenceStub(first).Generate(asked(900), timeout=2.5)
        begun = [await call.read() for _ in range(3)]
        call.cancel()
        resumed = InferenceStub(second).Resume(pb.ResumeRequest(session_id=begun[0].started.session_id))
        events = await drain(resumed)
        took_s = time.monotonic() - begun_at
    finished = events[-1].finished
    assert finished.usage.completion_tokens > len(tokens(begun))
    assert finished.reason in (types_pb2.FINISH_REASON_DEADLINE, types_pb2.FINISH_REASON_LENGTH)
    assert finished.reason == types_pb2.FINISH_REASON_LENGTH or 2.0 < took_s < 6.0
