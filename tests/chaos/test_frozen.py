"""A peer that is frozen or cut off is noticed in time; what it sends later is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

import outrider
from outrider.errors import Superseded, Unavailable
from outrider.rpc.channels import open_channel
from outrider.rpc.liveness import SILENCE_S
from outrider.rpc.status import from_rpc_error
from outrider.v1 import inference_pb2, types_pb2
from outrider.v1.inference_pb2_grpc import InferenceStub
from outrider.v1.verifier_pb2_grpc import VerifierStub
from tests.chaos.faults import ServerFault, scenario
from tests.chaos.injector import FaultInjector
from tests.chaos.load import Load, cases
from tests.chaos.servers import Server, Servers, Shape

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

SLACK_S = 1.5  # two loaded cores, and going on elsewhere
LASTS_S = 4.5  # of a black hole: longer than it takes to notice it
TOKENS = 900
PROMPT = "import os\n"
SESSIONS = 4


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def servers() -> AsyncIterator[Servers]:
    async with Servers(Shape(slots=8, proxied=True), lambda name, line: print(name, line)) as running:
        yield running


def begun(client: outrider.AsyncClient, seed: int) -> outrider.AsyncStream:
    """A long answer, asked for."""
    stream = client.stream(PROMPT, max_tokens=TOKENS, seed=seed, ignore_eos=True, timeout=60)
    stream.begin()
    return stream


async def undisturbed(client: outrider.AsyncClient, seed: int, tokens: int) -> list[int]:
    """The beginning of that answer, in one piece."""
    result = await client.generate(PROMPT, max_tokens=tokens, seed=seed, ignore_eos=True, timeout=60)
    return [*result.token_ids]


async def read(stream: outrider.AsyncStream, chunks: int) -> list[int]:
    """The next tokens of a stream that was begun."""
    tokens: list[int] = []
    for _ in range(chunks):
        chunk = await stream.next()
        assert chunk is not None
        tokens += chunk.token_ids
    return tokens


async def to_the_end(call: grpc.aio.UnaryStreamCall[Any, inference_pb2.GenerateResponse]) -> None:
    while await call.read():
        pass


async def serving(servers: Servers, session_id: str) -> tuple[Server, Server]:
    """The router and the verifier of a session."""
    record = (await servers.records([session_id]))[session_id]
    router, verifier = (
        next(server for server in servers.of(role) if server.serves(record)) for role in ("router", "verifier")
    )
    return router, verifier


async def soon(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await holds():
            await asyncio.sleep(0.05)


async def test_a_frozen_router_loses_its_session_and_its_late_writes_are_refused(servers: Servers) -> None:
    zombie, other = servers.of("router")
    request = inference_pb2.GenerateRequest(
        text=PROMPT, sampling=inference_pb2.Sampling(max_tokens=TOKENS, seed=3, ignore_eos=True)
    )
    # A caller that has not noticed anything: no keepalive, no resume.
    async with grpc.aio.insecure_channel(zombie.address) as channel, outrider.AsyncClient(other.address) as elsewhere:
        call = InferenceStub(channel).Generate(request)
        started = await call.read()
        assert isinstance(started, inference_pb2.GenerateResponse)
        session_id = started.started.session_id
        await call.read()
        before = (await servers.records([session_id]))[session_id]
        zombie.freeze()
        try:
            resumed = elsewhere.resume(session_id, timeout=60)
            resumed.begin()
            tokens = await read(resumed, 5)
            after = (await servers.records([session_id]))[session_id]
            assert (after.epoch > before.epoch, other.serves(after)) == (True, True)
        finally:
            zombie.thaw()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await to_the_end(call)
        assert isinstance(from_rpc_error(refused.value), Superseded)
        tokens += await read(resumed, 5)
        now = (await servers.records([session_id]))[session_id]
        assert (now.epoch, now.owner) == (after.epoch, after.owner)
        await resumed.cancel()
        assert tokens == await undisturbed(elsewhere, 3, len(tokens))


async def test_the_sdk_detects_a_frozen_router_and_resumes_at_another(servers: Servers) -> None:
    async with outrider.AsyncClient(servers.address(0)) as client:
        stream = begun(client, 4)
        tokens = await read(stream, 5)
        router, _ = await serving(servers, stream.session_id)
        router.freeze()
        frozen = time.monotonic()
        try:
            while True:
                waited = time.monotonic()
                tokens += await read(stream, 1)
                if time.monotonic() - waited > SILENCE_S / 4:
                    break
            assert time.monotonic() - frozen < SILENCE_S + SLACK_S
        finally:
            router.thaw()
        await stream.cancel()
        assert tokens == await undisturbed(client, 4, len(tokens))


async def test_a_frozen_verifier_is_replaced_and_releases_its_sessions_when_it_thaws(servers: Servers) -> None:
    async with outrider.AsyncClient(servers.address(1)) as client:
        stream = begun(client, 5)
        tokens = await read(stream, 5)
        before = (await servers.records([stream.session_id]))[stream.session_id]
        _, verifier = await serving(servers, stream.session_id)
        verifier.freeze()
        frozen = time.monotonic()
        try:
            record = before
            while record.verifier == before.verifier:
                tokens += await read(stream, 1)
                record = (await servers.records([stream.session_id]))[stream.session_id]
            assert time.monotonic() - frozen < SILENCE_S + SLACK_S
            assert record.epoch > before.epoch
        finally:
            verifier.thaw()

        async def idle() -> bool:
            async with open_channel(verifier.address) as channel:
                return not (await VerifierStub(channel).Describe(types_pb2.DescribeRequest())).sessions

        await soon(idle)
        tokens += await read(stream, 5)
        await stream.cancel()
        assert tokens == await undisturbed(client, 5, len(tokens))


async def test_a_frozen_redis_pauses_generation_and_callers_receive_the_reason(servers: Servers) -> None:
    (redis,) = servers.of("redis")
    async with outrider.AsyncClient(servers.address(0)) as client:
        stream = begun(client, 6)
        tokens = await read(stream, 5)
        redis.freeze()
        frozen = time.monotonic()
        try:
            with pytest.raises(Unavailable, match="Redis"):
                await client.get_session(stream.session_id, timeout=30)
            assert time.monotonic() - frozen < SILENCE_S + SLACK_S / 2
        finally:
            redis.thaw()
        thawed = time.monotonic()
        tokens += await read(stream, 20)
        assert time.monotonic() - thawed < SILENCE_S + SLACK_S
        await stream.cancel()
        assert tokens == await undisturbed(client, 6, len(tokens))


BLACK_HOLES = [
    pytest.param(("router", "drafter"), id="two"),
    pytest.param(
        ("router", "verifier", "drafter", "router-redis", "verifier-redis", "drafter-redis"),
        id="all",
        marks=[pytest.mark.long, pytest.mark.timeout(300)],
    ),
]


@pytest.mark.parametrize("links", BLACK_HOLES)
async def test_a_black_hole_costs_time_and_no_token(servers: Servers, links: tuple[str, ...]) -> None:
    faults = {fault.link: fault for fault in scenario("black-hole", 1, 1)}
    injected = [
        ServerFault("black-hole", faults[link].role, "busiest", after=20, lasts_s=LASTS_S, link=link) for link in links
    ]
    async with Load(servers, cases(SESSIONS, 192), seed=2) as load:
        await load.undisturbed()
        load.begin()
        await load.more(50, 10.0)
        injector = FaultInjector(servers, load, print)
        await injector.run(injected, within_s=120.0)
        await load.end()
    assert not load.tally.wrong, load.tally
    assert all(done.worst < SILENCE_S + SLACK_S and not done.stranded for done in injector.done)
