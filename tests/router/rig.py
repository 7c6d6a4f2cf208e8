"""A router on real gRPC with a real Redis, for tests that put scripted neighbours around it."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from outrider.config import RouterConfig
from outrider.rpc.channels import open_channel
from outrider.store.redis.client import connect
from outrider.store.redis.embedded import find_server
from outrider.store.registry import Registry
from outrider.store.sessions import Sessions
from outrider.v1 import inference_pb2 as pb
from outrider.v1.inference_pb2_grpc import InferenceStub
from router.requests.served_models import load_model
from router.server import run
from tests.router.fakes import FakeVerifier, announced

FOLDER = Path(__file__).parents[2] / "models" / "mid"  # the target's tokenizer, without its chat template
MODEL = load_model("target", FOLDER)
ANSWER = "def f(x):\n    return x + 1  # é🙂\n"
SCRIPT = MODEL.tokenizer.encode(ANSWER).ids


class Rig:
    """A router with its Redis, and a client."""

    def __init__(self, address: str, stub: InferenceStub, client: Redis) -> None:
        self.address = address
        self.stub = stub
        self.client = client
        self.registry = Registry(client)
        self.sessions = Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=30)


class Restartable:
    """A Redis that can be killed and started again at the same address, on the same data."""

    def __init__(self, folder: Path) -> None:
        self.url = f"unix://{folder}/redis.sock"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        options = {
            "port": "0",
            "unixsocket": f"{self._folder}/redis.sock",
            "dir": str(self._folder),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        self._process = subprocess.Popen([str(find_server()), *flags], stdout=subprocess.DEVNULL)
        with redis.Redis.from_url(self.url, retry=Retry(ConstantBackoff(0.01), 500)) as client:
            client.ping()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    stop = kill


_running: set[asyncio.Task[None]] = set()  # routers of this process


def _left() -> list[str]:
    """Tasks whose code is the router's."""
    return [text for text in map(repr, asyncio.all_tasks()) if "/router/" in text.replace("/tests/router/", "")]


@asynccontextmanager
async def running_router(redis_url: str, **options: Any) -> AsyncIterator[Rig]:
    config = RouterConfig(**{"listen": "127.0.0.1:0", "models": {"target": FOLDER}, **options})
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(run(config, redis_url, announce=bound.set_result))
    _running.add(server)
    server.add_done_callback(_running.discard)
    await asyncio.wait([server, bound], return_when=asyncio.FIRST_COMPLETED)
    if server.done():
        server.result()
    client = connect(redis_url)
    channel = open_channel(await bound)
    try:
        yield Rig(bound.result(), InferenceStub(channel), client)
    finally:
        await channel.close()
        server.cancel()
        with pytest.raises(asyncio.CancelledError):
            await server
        await client.aclose()
        # Whatever happened in the test: nothing of the last router may be left.
        for _ in range(500):
            if _running or not _left():
                break
            await asyncio.sleep(0.01)
        assert _running or not _left()


@asynccontextmanager
async def scripted_router(redis_url: str, **verifying: Any) -> AsyncIterator[Rig]:
    """A router that serves at once; its verifier, a FakeVerifier with these options, commits SCRIPT over and over."""
    verifier = FakeVerifier(SCRIPT, **verifying)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        while not (await rig.stub.ListModels(pb.ListModelsRequest())).models:
            await asyncio.sleep(0.01)
        yield rig


def script(length: int) -> list[int]:
    """The first tokens of an answer of such a router."""
    return [SCRIPT[index % len(SCRIPT)] for index in range(length)]


def ask(prompt: str = "import os\n", **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=prompt, sampling=pb.Sampling(**sampling))


async def until(holds: Callable[[], bool], within_s: float = 3.0) -> None:
    give_up = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < give_up, "did not come true in time"
        await asyncio.sleep(0.005)


async def drain(call: Any, events: list[pb.GenerateResponse] | None = None) -> list[pb.GenerateResponse]:
    """The events that are still to come; `events` has those before an error."""
    events = [] if events is None else events
    while isinstance(event := await call.read(), pb.GenerateResponse):
        events.append(event)
    return events


async def collect(call: Any) -> tuple[pb.Started, list[pb.Chunk], pb.Finished]:
    events = await drain(call)
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["chunk"] * (len(kinds) - 2), "finished"]
    return events[0].started, [event.chunk for event in events[1:-1]], events[-1].finished


async def released(rig: Rig, session_id: str) -> None:
    async with asyncio.timeout(3):
        while (await rig.sessions.get(session_id)).lease:
            await asyncio.sleep(0.005)


async def finished_reason(rig: Rig, session_id: str) -> str:
    for _ in range(200):
        if reason := (await rig.sessions.get(session_id)).finished:
            return reason
        await asyncio.sleep(0.01)
    raise AssertionError("not marked as finished")
