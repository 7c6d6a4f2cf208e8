"""Sessions that end in every way there is leave nothing: no task, stream, KV slot, key, descriptor or file."""

import asyncio
import itertools
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest
import pytest_asyncio

import outrider
from outrider.errors import NotFound, Overloaded
from outrider.fleet.cluster import LocalCluster
from outrider.rpc.channels import open_channel
from outrider.rpc.status import from_rpc_error
from outrider.v1 import inference_pb2
from outrider.v1.inference_pb2_grpc import InferenceStub
from tests.e2e.conftest import MODELS
from tests.e2e.leaks import SLACK, forgetful, nothing_left, resident

pytestmark = pytest.mark.asyncio(loop_scope="session")

AT_ONCE = 8
SLOTS = 12
WAYS = 7
SOAKS = [  # seconds
    pytest.param(60.0, id="minute", marks=[pytest.mark.long, pytest.mark.timeout(180)]),
    pytest.param(600.0, id="ten-minutes", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
]
# Most that a process may hold in a soak's last third over the end of its first: heaps that fill took 15 (levelling off
# in the second minute), and a leak of 15 kB a session, of which there are about 2,000 in between, takes 30. What a
# router leaves of a session is counted to the byte, without its heap's gaps, in tests/router/test_growth.py.
MORE_MB = 25
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
    config = forgetful(MODELS / "drafter", "drafter", SLOTS)
    async with LocalCluster(config, forward=lambda name, line: print(name, line)) as running:
        yield running
    monkeypatch.undo()
    os.rmdir(folder)  # this fails if a file was left


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
        case 6:  # a turn that is cancelled by its session's name, and another
            stream = client.stream("x = 1\n", max_tokens=50, seed=seed, timeout=30)
            async for _ in stream:
                await client.cancel(stream.session_id)
            await client.generate("y = 2\n", session=stream.session_id, max_tokens=2, timeout=30)
        case _:
            raise ValueError(way)


@asynccontextmanager
async def served(cluster: LocalCluster) -> AsyncIterator[Callable[[int], Awaitable[bool]]]:
    """Gives what runs a numbered session, AT_ONCE at most, and returns whether it ended in the way meant for it; at the
    end the cluster must hold nothing of any of them, and still serve.
    """
    async with outrider.AsyncClient(cluster.router_address) as client, open_channel(cluster.router_address) as channel:
        stub = InferenceStub(channel)
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> bool:
            async with gate:
                try:
                    await one_session(client, stub, number % WAYS, number)
                except (Overloaded, NotFound):  # of resuming what had not begun, or was closed
                    return False
                except grpc.aio.AioRpcError as error:  # without the SDK between
                    if not isinstance(from_rpc_error(error), Overloaded | NotFound):
                        raise
                    return False
                return True

        async def warm_up() -> None:
            await asyncio.gather(*map(one, range(30)))

        async with nothing_left(cluster, warm_up):
            yield one
        await asyncio.gather(*(client.generate("a", max_tokens=4, timeout=30) for _ in range(SLOTS)))


@pytest.mark.parametrize("count", COUNTS)
async def test_sessions_that_end_in_every_way_leave_nothing(short_lived: LocalCluster, count: int) -> None:
    async with served(short_lived) as one:
        await asyncio.gather(*map(one, range(count)))


@pytest.mark.parametrize("seconds", SOAKS)
async def test_a_soak_leaves_no_state_and_memory_levels_off(short_lived: LocalCluster, seconds: float) -> None:
    numbers, ended = itertools.count(), Counter[int]()
    held: list[dict[str, float]] = []  # a second apart
    async with served(short_lived) as one:
        until = time.monotonic() + seconds

        async def caller() -> None:
            while time.monotonic() < until:
                number = next(numbers)
                if await one(number):
                    ended[number % WAYS] += 1

        async def watch() -> None:
            while time.monotonic() < until:
                held.append(resident(short_lived))
                await asyncio.sleep(1)

        await asyncio.gather(watch(), *(caller() for _ in range(AT_ONCE)))
    third = len(held) // 3
    for name in held[0]:
        print(name, "MB at each tenth:", *(round(held[len(held) * tenth // 10][name]) for tenth in range(10)))
    for name, first in held[third].items():
        last = max(figure[name] for figure in held[-third:])
        assert last <= first + MORE_MB, (name, [round(figure[name]) for figure in held])
    assert all(ended[way] > 2 * SLACK for way in range(WAYS)), ended
