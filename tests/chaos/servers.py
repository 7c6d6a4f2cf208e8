"""Servers that can be killed, frozen and cut off, and started again as a supervisor would."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

import outrider
from bench.faults import FaultProxy
from outrider.config import DrafterConfig, RouterConfig, VerifierConfig
from outrider.errors import OutriderError, Unavailable
from outrider.fleet.process import Process
from outrider.store.redis.client import connect
from outrider.store.redis.embedded import find_server
from outrider.store.registry import Registry
from outrider.store.sessions import SessionRecord, Sessions
from tests.e2e.conftest import MODELS

Role = Literal["drafter", "router", "verifier", "redis"]
Worker = Literal["drafter", "router", "verifier"]
ROLES: tuple[Role, ...] = ("drafter", "router", "verifier", "redis")
WORKERS: tuple[Worker, ...] = ("drafter", "router", "verifier")
Forward = Callable[[str, str], None]

GOES_ON = re.compile(r"session (\w+) goes on at \S+: (\d+) tokens read again, ([\d.]+) s")
READY_S = 60.0  # for a server to be there for the others
PORTS = 18_000, 30_000
AGAIN_S = 0.5  # between two attempts to start one
LOOK_S = 0.02

_given: set[int] = set()  # ports, to servers that may not run yet


def steady_port() -> int:
    """A free port that no connection is given by chance while its server is down: the kernel takes those from above;
    another one at each call."""
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


class Child(Protocol):
    """The process that a server runs in."""

    @property
    def pid(self) -> int:
        """The id of the present process."""

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""

    async def start(self, redis_url: str) -> None:
        """Starts it, for the first time or again."""

    async def wait(self) -> int:
        """Its exit status, once it has ended."""

    async def stop(self) -> None:
        """Sends SIGTERM, and waits until it has ended."""


class RedisProcess:
    """A Redis whose data outlive it."""

    def __init__(self, port: int, folder: Path) -> None:
        self._command = (
            *(str(find_server()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)),
            *("--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction"),
            *("--auto-aof-rewrite-min-size", "8mb"),
        )
        self._url = f"redis://127.0.0.1:{port}"
        self._child: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The id of the present process."""
        return self._running().pid

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._running().returncode

    async def start(self, redis_url: str = "") -> None:
        """Return once it answers."""
        self._child = await asyncio.create_subprocess_exec(
            *self._command, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        async with asyncio.timeout(READY_S), aclosing(Redis.from_url(self._url)) as client:
            while True:
                with suppress(RedisError, OSError):
                    await client.ping()
                    return
                await asyncio.sleep(LOOK_S)

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        return await self._running().wait()

    async def stop(self) -> None:
        """Sends SIGTERM, and waits until it has ended."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.terminate()
            await self._child.wait()

    def _running(self) -> asyncio.subprocess.Process:
        if self._child is None:
            raise RuntimeError("Redis has not been started")
        return self._child


@dataclass(eq=False)
class Server:
    """One server, in whichever process by now."""

    role: Role
    name: str
    child: Child
    address: str  # where the others reach it
    known_as: str = ""  # in the registry and in sessions' records: its present process
    frozen: bool = False

    def kill(self) -> None:
        """Sends SIGKILL."""
        os.kill(self.child.pid, signal.SIGKILL)

    def freeze(self) -> None:
        """Sends SIGSTOP."""
        self.frozen = True
        os.kill(self.child.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Sends SIGCONT."""
        self.frozen = False
        with suppress(ProcessLookupError):
            os.kill(self.child.pid, signal.SIGCONT)

    def serves(self, record: SessionRecord) -> bool:
        """Return whether a session depends on it."""
        if self.role == "router":
            return record.owner.startswith(f"{self.known_as}/")
        return self.role == "redis" or self.known_as in (record.verifier, *record.drafters)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a router logged about a session that went on at a verifier."""

    at: float  # monotonic
    session_id: str
    tokens: int  # tokens that the verifier read again; 0: it had them
    seconds: float  # from asking the verifier to its first token


@dataclass(frozen=True, slots=True)
class Shape:
    """How many servers, and what they are like."""

    routers: int = 2
    verifiers: int = 2
    drafters: int = 2
    slots: int = 80  # of each worker: room for all sessions, for those it stands by for, and what has yet to be let go
    lease_s: float = 10.0
    resume_ttl_s: float = 60.0
    standby: bool = False  # whether a second verifier keeps each session's KV
    proxied: bool = False  # whether they reach each other through proxies alone, for black holes


class Servers:
    """All servers of a shape; entered, they are there and know each other. Leaving ends them, whatever befell them.

    `links` are the proxies of a shape that is `proxied`, by the name of the server that they lead to; the ways to Redis
    are "router-redis" and so on.
    """

    def __init__(self, shape: Shape | None = None, forward: Forward = lambda name, line: None) -> None:
        self.shape = shape or Shape()
        self.all: list[Server] = []
        self.links: dict[str, FaultProxy] = {}
        self.redis_url = ""  # past all proxies
        self.readings: list[Reading] = []
        self._forward = forward
        self._ways: dict[Role, str] = {}  # to Redis
        self._stack = AsyncExitStack()

    def _read(self, name: str, line: str) -> None:
        if found := GOES_ON.search(line):
            self.readings.append(Reading(time.monotonic(), found[1], int(found[2]), float(found[3])))
        self._forward(name, line)

    def of(self, *roles: Role) -> list[Server]:
        """The servers of these roles."""
        return [server for server in self.all if server.role in roles]

    def named(self, name: str) -> Server:
        """The server of that name."""
        return next(server for server in self.all if server.name == name)

    def address(self, first: int = 0) -> str:
        """All routers, for the SDK, from one of them on."""
        routers = [server.address for server in self.of("router")]
        first %= len(routers)
        return "ipv4:" + ",".join(routers[first:] + routers[:first])

    async def start(self, server: Server) -> None:
        """Starts a server, be it again, and waits until the others know it."""
        await server.child.start(self._ways.get(server.role, ""))
        server.frozen = False
        give_up = time.monotonic() + READY_S
        while server.role != "redis":
            try:
                name = self._introduced if server.role == "router" else self._announced
                server.known_as = await name(server)
                return
            except OutriderError:  # Redis failed meanwhile
                if time.monotonic() > give_up or server.child.status is not None:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def revive(self, server: Server) -> None:
        """What a supervisor does for one that has ended: starts it, and again if it finds no Redis. Raises
        OutriderError when that is of no use for long."""
        await server.child.wait()
        give_up = time.monotonic() + READY_S
        while True:
            try:
                return await self.start(server)
            except OutriderError:
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def records(self, session_ids: Iterable[str]) -> dict[str, SessionRecord]:
        """What Redis holds of sessions, past all proxies."""
        async with aclosing(connect(self.redis_url)) as client:
            sessions = Sessions(client, ttl_s=1, lease_s=1, resume_ttl_s=1)
            ids = list(session_ids)
            found = await asyncio.gather(*(sessions.get(name) for name in ids))
        return dict(zip(ids, found, strict=True))

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
            port = steady_port()
            redis = Server("redis", "redis", RedisProcess(port, folder), f"127.0.0.1:{port}")
            self.redis_url = f"redis://{redis.address}"
            self.all.append(redis)
            stack.push_async_callback(self._stop)
            await self.start(redis)
            for role in WORKERS:
                self._ways[role] = f"redis://{await self._link(stack, f'{role}-redis', redis.address)}"
                for number in range(getattr(self.shape, f"{role}s")):
                    self.all.append(await self._server(stack, role, f"{role}-{number}"))
            await asyncio.gather(*map(self.start, self.of("verifier", "drafter")))
            await asyncio.gather(*map(self.start, self.of("router")))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _server(self, stack: AsyncExitStack, role: Worker, name: str) -> Server:
        listen = f"127.0.0.1:{steady_port()}"
        address = await self._link(stack, name, listen)
        section = self._section(role, listen, address)
        return Server(role, name, Process(role, name, section, self._read), address)

    def _section(self, role: Worker, listen: str, address: str) -> RouterConfig | VerifierConfig | DrafterConfig:
        shape = self.shape
        match role:
            case "router":
                return RouterConfig(
                    listen=listen,
                    models={"target": MODELS / "target"},
                    policy="fixed",
                    overlap=True,  # drafters are at work whatever they bring, so that a fault meets a session
                    depth=4,
                    lease_s=shape.lease_s,
                    resume_ttl_s=shape.resume_ttl_s,
                    standby=shape.standby,
                )
            case "verifier":
                return VerifierConfig(
                    model=MODELS / "target", dtype="float32", listen=listen, advertise=address, slots=shape.slots
                )
            case "drafter":
                return DrafterConfig(
                    model=MODELS / "drafter", dtype="float32", listen=listen, advertise=address, slots=shape.slots
                )

    async def ids(self) -> list[str]:
        """The sessions that Redis holds, past all proxies."""
        async with aclosing(connect(self.redis_url)) as client:
            return [session async for session in Sessions(client, ttl_s=1, lease_s=1, resume_ttl_s=1).ids()]

    async def _link(self, stack: AsyncExitStack, name: str, target: str) -> str:
        """The address at which others reach `target`."""
        if not self.shape.proxied:
            return target
        proxy = self.links[name] = await stack.enter_async_context(FaultProxy(target))
        return proxy.address

    async def _announced(self, server: Server) -> str:
        """A worker's id."""
        async with aclosing(connect(self.redis_url)) as client:
            registry = Registry(client)
            give_up = time.monotonic() + READY_S
            while time.monotonic() < give_up:
                for worker in await registry.workers():
                    if worker.address == server.address and worker.worker_id != server.known_as:
                        return worker.worker_id
                await asyncio.sleep(LOOK_S)
        raise Unavailable(f"{server.name} did not announce itself within {READY_S:g} s")

    async def _introduced(self, server: Server) -> str:
        """A router's id, which stands in the records of what it owns; and it has seen the others by then."""
        async with outrider.AsyncClient(server.address) as client:
            stream = client.stream("x", max_tokens=1, timeout=READY_S)
            async for _ in stream:
                pass
            record = (await self.records([stream.session_id]))[stream.session_id]
            await client.close_session(stream.session_id)
        return record.owner.partition("/")[0]

    async def _stop(self) -> None:
        for server in self.all:
            if server.frozen:
                server.thaw()
        for role in ("router", "drafter", "verifier", "redis"):
            await asyncio.gather(*(server.child.stop() for server in self.of(role)))
