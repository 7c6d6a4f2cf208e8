"""Sessions that end in every way there is leave nothing: no task, stream, KV slot, key, descriptor or file."""

import asyncio
import os
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio

import outrider
from outrider.cli.cluster import LocalCluster
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.errors import NotFound, Overloaded
from outrider.rpc.channels import open_channel
from outrider.store.client import connect
from outrider.v1 import drafter_pb2, inference_pb2, types_pb2
from outrider.v1.drafter_pb2_grpc import DrafterStub
from outrider.v1.inference_pb2_grpc import InferenceStub
from tests.e2e.conftest import MODELS
from tests.e2e.mini_router import described

pytestmark = pytest.mark.asyncio(loop_scope="session")

AT_ONCE = 8
SLOTS = 12
EXPIRED = -2  # what Redis says of a key that is not there
SLACK = 12  # pools keep what was ever needed at once; a leak in one way of six is 25 in the smallest run
COUNTS = [
    pytest.param(150, id="150"),
    pytest.param(10_000, id="10000", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
]


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def short_lived() -> AsyncIterator[LocalCluster]:
    """A cluster that soon forgets sessions. The smallest model is its target and drafts for itself."""
    folder = tempfile.mkdtemp(prefix="leaks-")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setenv("TMPDIR", folder)
    config = ClusterConfig(
        router=RouterConfig(
            listen="127.0.0.1:0",
            models={"drafter": MODELS / "drafter"},
            max_sessions=64,
            session_ttl_s=2,
            resume_ttl_s=1,
            lease_s=1,
        ),
        verifier=[VerifierConfig(model=MODELS / "drafter", dtype="float32", slots=SLOTS)],
        drafter=[DrafterConfig(model=MODELS / "drafter", dtype="float32", slots=SLOTS)],
    )
    async with LocalCluster(config, forward=lambda name, line: print(name, line)) as running:
        yield running
    monkeypatch.undo()
    os.rmdir(folder)  # which fails if a file was left


async def one_session(client: outrider.AsyncClient, stub: InferenceStub, way: int, seed: int) -> None:
    """Opens a session and ends it in one of several ways."""
    request = inference_pb2.GenerateRequest(
        text="import os\n", sampling=inference_pb2.Sampling(max_tokens=12, seed=seed, ignore_eos=True)
    )
    match way:
        case 0:
            await client.generate("x = 1\n", max_tokens=3, seed=seed, timeout=30)
        case 1:  # cancelled after the first chunk
            async for _ in client.stream("x = 1\n", max_tokens=50, seed=seed, timeout=30):
                break
        case 2:  # broken off, at any moment
            call = stub.Generate(request)
            await asyncio.sleep(random.Random(seed).uniform(0, 0.05))
            call.cancel()
        case 3:  # broken off and resumed
            call = stub.Generate(request)
            started = await call.read()
            call.cancel()
            if isinstance(started, inference_pb2.GenerateResponse):
                async for _ in client.resume(started.started.session_id, timeout=30):
                    pass
        case 4:  # closed while it runs
            stream = client.stream("x = 1\n", max_tokens=50, seed=seed, timeout=30)
            async for _ in stream:
                await client.close_session(stream.session_id)
        case 5:  # two turns
            session = (await client.create_session()).session_id
            for turn in range(2):
                await client.generate("y = 2\n", session=session, max_tokens=2, seed=turn, timeout=30)


@pytest.mark.parametrize("count", COUNTS)
async def test_sessions_that_end_in_every_way_leave_nothing(short_lived: LocalCluster, count: int) -> None:
    verifier = short_lived.processes["verifier-0"].address
    async with (
        outrider.AsyncClient(short_lived.router_address) as client,
        open_channel(short_lived.router_address) as channel,
        open_channel(short_lived.processes["drafter-0"].address) as to_drafter,
    ):
        stub, drafter = InferenceStub(channel), DrafterStub(to_drafter)
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with gate:
                with suppress(Overloaded, NotFound):  # of resuming what had not begun, or was closed
                    await one_session(client, stub, number % 6, number)

        await asyncio.gather(*map(one, range(30)))
        before = await figures(short_lived, drafter)
        await asyncio.gather(*map(one, range(count)))
        async with asyncio.timeout(15):
            while (await described(verifier)).sessions or (
                await drafter.Describe(types_pb2.DescribeRequest())
            ).sessions:
                await asyncio.sleep(0.05)
        await asyncio.sleep(4)  # time to live, leases, and what waits for either
        after = await figures(short_lived, drafter)
        for name, value in after.items():
            assert value <= before[name] + SLACK, (name, before, after)
        async with connect(short_lived.redis_url) as redis:
            for key in await redis.keys("*"):
                if b"{workers}" in key or b"{cluster}" in key:
                    continue
                # Of closed sessions a tombstone stays for a minute.
                assert key.endswith(b":session"), key
                closed, left_ms = await redis.hget(key, "closed"), await redis.pttl(key)
                assert left_ms == EXPIRED or (closed and 0 <= left_ms <= 60_000), (key, closed, left_ms)
        await asyncio.gather(*(client.generate("a", max_tokens=4, timeout=30) for _ in range(SLOTS)))


async def figures(cluster: LocalCluster, drafter: DrafterStub) -> dict[str, int]:
    """What must not grow with the number of sessions that were served."""
    verifier = await described(cluster.processes["verifier-0"].address)
    drafting: drafter_pb2.DrafterDescription = await drafter.Describe(types_pb2.DescribeRequest())
    counts = {"verifier tasks": verifier.tasks, "drafter tasks": drafting.tasks, "streams": verifier.drafters}
    for name, process in cluster.processes.items():
        counts[f"{name} descriptors"] = len(os.listdir(f"/proc/{process.pid}/fd"))
        counts[f"{name} threads"] = len(os.listdir(f"/proc/{process.pid}/task"))
    return counts
