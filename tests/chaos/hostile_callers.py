"""Callers that do what callers must not: they do not read, they vanish, they ask for what is not theirs. The others are
measured meanwhile, and everything is read to its end afterwards."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from outrider.errors import Unavailable
from outrider.rpc.status import from_rpc_error
from outrider.store.sessions import SessionRecord
from outrider.v1 import inference_pb2 as pb
from outrider.v1.inference_pb2_grpc import InferenceStub
from router.sessions.outbox import SLOW_CLIENT_S
from tests.chaos.report import quantile
from tests.chaos.servers import Forward, Servers, Shape
from tests.http2 import Http2Client

SLOTS = 4
RUNNING = 16  # generations beside refused calls
REFUSED = 10_000
AT_ONCE = 32
CONTEXT = 512  # tokens
PROMPT = "import os\n\n\ndef main(path):\n"
UNREAD: dict[str, Any] = {"max_tokens": CONTEXT - 64, "logprobs": 20, "temperature": 1.0}
ASKED: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0}
GENERATE = "/outrider.v1.Inference/Generate"
SERVED_S = 1.0  # for a caller's first token once a client that does not read has lost its place
SLOWER = 2.0  # times an empty cluster's 99th percentile
ENOUGH = 100  # callers that a 99th percentile is taken of
GROWN = 64 * 2**20  # bytes that a router may grow by
NARROW = (  # what gRPC takes for a client that does not read grows to megabytes, which are the client's own
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2**16),
    ("grpc.use_local_subchannel_pool", 1),
)

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One measurement, and whether it keeps its bound."""

    what: str
    measured: str
    bound: str
    met: bool


def table(findings: Sequence[Finding]) -> str:
    """The findings as a table in Markdown, for people."""
    head = "| what | measured | bound | |\n| --- | --- | --- | --- |\n"
    return head + "\n".join(
        f"| {it.what} | {it.measured} | {it.bound} | {'met' if it.met else 'not met'} |" for it in findings
    )


class HostileCallers:
    """Callers that misbehave, against clusters of their own."""

    def __init__(self, report: Report, forward: Forward, seconds: float, refused: int = REFUSED) -> None:
        """`seconds`: how long others are measured beside each kind of client that does not read."""
        self.findings: list[Finding] = []
        self._report = report
        self._forward = forward
        self._seconds = seconds
        self._refused = refused

    async def run(self) -> None:
        """Fills `findings`."""
        async with self._cluster(SLOTS) as target:
            await self._beside_unread(target)
            await self._ended(target)
        async with self._cluster(RUNNING + 8) as target:
            await self._refusals(target)

    @asynccontextmanager
    async def _cluster(self, slots: int) -> AsyncIterator[Target]:
        shape = Shape(routers=1, verifiers=1, drafters=1, slots=slots, resume_ttl_s=600.0)  # all is resumed in the end
        async with Servers(shape, self._forward) as servers, Target(servers) as target:
            yield target

    def _found(self, what: str, measured: str, bound: str, met: bool) -> None:
        self.findings.append(Finding(what, measured, bound, met))
        self._report(f"{what}: {measured} (bound: {bound}){'' if met else '  NOT MET'}")

    async def _beside_unread(self, target: Target) -> None:
        """Other callers, beside each kind of client that does not read."""
        await target.first_tokens(2.0)
        empty = sorted(await target.first_tokens(self._seconds / 6))
        bound_s = SLOWER * quantile(empty, 0.99)
        self._report(f"an empty cluster: first token p99 {quantile(empty, 0.99):.3f} s of {len(empty)} callers")
        whole = await target.text(await target.whole())
        kinds: tuple[tuple[str, Callable[[], Any], float], ...] = (
            (f"{SLOTS} that do not read", lambda: target.unread(SLOTS), self._seconds),
            (f"{10 * SLOTS} that do not read", lambda: target.unread(10 * SLOTS), self._seconds),
            (f"{SLOTS} that read a byte a second", lambda: target.dripping(SLOTS, 2**16 - 1), self._seconds / 4),
            (f"{SLOTS} with a window of one byte", lambda: target.dripping(SLOTS, 1), self._seconds / 4),
            (f"{SLOTS} that vanish and do not close", lambda: target.vanishing(SLOTS), self._seconds / 4),
        )
        for name, begin, seconds in kinds:
            before = target.router_bytes()
            async with begin() as sessions:
                began = time.monotonic()
                await asyncio.sleep(0.1)  # so that they are there first
                stall = await target.first_tokens(SLOW_CLIENT_S)
                took = await target.first_tokens(max(2.0, seconds - SLOW_CLIENT_S))
                grown = target.router_bytes() - before
                p99 = quantile(sorted([*stall, *took]), 0.99)
                self._report(f"beside {name}, {time.monotonic() - began:.0f} s: {len(stall) + len(took)} callers")
                self._found(
                    f"first token beside {name}, after the stall limit",
                    f"worst {max(took):.3f} s of {len(took)}",
                    f"{SERVED_S:g} s",
                    max(took) <= SERVED_S,
                )
                if len(took) >= ENOUGH:
                    what = f"first token beside them from the beginning on, p99 of {len(stall) + len(took)}"
                    self._found(what, f"{p99:.3f} s", f"{bound_s:.3f} s", p99 <= bound_s)
                self._found(
                    f"memory of the router beside {name}",
                    f"{grown / 2**20:+.1f} MiB",
                    f"{GROWN >> 20} MiB",
                    grown <= GROWN,
                )
            if sessions:
                texts = [await target.text(session) for session in sessions]
                right = sum(text == whole for text in texts)
                self._found(f"resumed answers of {name}", f"{right} of {len(texts)} whole", "all", right == len(texts))

    async def _ended(self, target: Target) -> None:
        """Every end of a generation that is not read."""

        async def cancel(session: str) -> None:
            await target.stub.Cancel(pb.CancelRequest(session_id=session), timeout=10)

        async def close(session: str) -> None:
            await target.stub.CloseSession(pb.CloseSessionRequest(session_id=session), timeout=10)

        ends: tuple[tuple[str, Callable[[str], Awaitable[None]]], ...] = (("Cancel", cancel), ("CloseSession", close))
        for name, end in ends:
            async with target.unread(SLOTS) as sessions:
                await under_way(sessions)
                began = time.monotonic()
                await asyncio.gather(*map(end, sessions))
                await self._over(name, target, sessions, began)
        before = await target.sessions()
        async with target.answering(SLOTS, "3S") as began:
            while len(sessions := sorted(await target.sessions() - before)) < SLOTS:
                await asyncio.sleep(0.05)
            await self._over("a deadline", target, sessions, began + 3.0)
        router = target.servers.of("router")[0]
        async with target.unread(SLOTS) as sessions:
            await under_way(sessions)
            began = time.monotonic()
            os.kill(router.child.pid, signal.SIGTERM)
            await self._over("SIGTERM of the router", target, sessions, began)
            await router.child.wait()
            took = time.monotonic() - began
            self._report(f"the router's process had ended after {took:.2f} s")
            await target.servers.start(router)

    async def _over(self, name: str, target: Target, sessions: Sequence[str], began: float) -> None:
        """Waits until no router owns these sessions' generations any more."""
        give_up = time.monotonic() + 20.0
        while time.monotonic() < give_up and any(record.lease for record in await target.records(sessions)):
            await asyncio.sleep(0.01)
        took = time.monotonic() - began
        self._found(f"{name} on {len(sessions)} that are not read", f"{took:.2f} s", "1 s", took <= 1.0)

    async def _refusals(self, target: Target) -> None:
        """Calls that are to change nothing, against generations that run."""
        whole = await target.text(await target.whole())
        answers: list[list[str]] = [[] for _ in range(RUNNING)]
        sessions: list[str] = [""] * RUNNING
        errors: list[str] = []
        over = False

        async def generate(number: int) -> None:
            while not over:
                text = ""
                try:
                    async for event in target.stub.Generate(request(seed=1, **UNREAD)):
                        sessions[number] = event.started.session_id or sessions[number]
                        text += event.chunk.text
                except grpc.aio.AioRpcError as error:
                    errors.append(str(from_rpc_error(error)))
                answers[number].append(text)

        tasks = [asyncio.create_task(generate(number)) for number in range(RUNNING)]
        ended = await target.whole()
        closed = (await target.stub.CreateSession(pb.CreateSessionRequest())).session_id
        await target.stub.CloseSession(pb.CloseSessionRequest(session_id=closed))
        empty = (await target.stub.CreateSession(pb.CreateSessionRequest())).session_id
        while not all(sessions):
            await asyncio.sleep(0.05)
        calls = refused_calls(target.stub, sessions, ended, empty, closed)
        outcomes: Counter[tuple[str, str]] = Counter()
        left = iter(range(self._refused))

        async def press() -> None:
            for _ in left:
                name, call = next(calls)
                try:
                    await call()
                    outcomes[name, "OK"] += 1
                except grpc.aio.AioRpcError as error:
                    outcomes[name, error.code().name] += 1

        await asyncio.gather(*(press() for _ in range(AT_ONCE)))
        over = True
        await asyncio.gather(*tasks)
        finished = [text for texts in answers for text in texts]
        wrong = sum(text != whole for text in finished) + len(errors)
        self._report(", ".join(f"{name}: {code} {count}" for (name, code), count in sorted(outcomes.items())))
        self._found(
            f"{outcomes.total()} refused calls against {RUNNING} generations",
            f"{wrong} of {len(finished)} answers disturbed",
            "none",
            not wrong and len(finished) >= RUNNING,
        )
        await asyncio.sleep(0.5)
        leases = sum(bool(record.lease) for record in await target.records([*sessions, ended, empty]))
        self._found("leases that are left then", str(leases), "none", not leases)


class Target:
    """A cluster with one router, and ways to misuse it."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers
        self.stub: InferenceStub
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Target:
        self._router = self.servers.of("router")[0]
        channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(self._router.address))
        self.stub = InferenceStub(channel)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    def router_bytes(self) -> int:
        """The memory of the router's process."""
        return int(Path(f"/proc/{self._router.child.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def records(self, sessions: Sequence[str]) -> list[SessionRecord]:
        """What Redis holds of them; closed ones have no lease."""
        return [*(await self.servers.records(sessions)).values()]

    async def sessions(self) -> set[str]:
        """The ids of all sessions that Redis holds."""
        return set(await self.servers.ids())

    async def first_tokens(self, seconds: float) -> list[float]:
        """One caller after the other, who reads: seconds to each one's first token."""
        until, took = time.monotonic() + seconds, list[float]()
        for seed in itertools.count():
            began, first = time.monotonic(), 0.0
            async for event in self.stub.Generate(request(seed=seed, **ASKED), timeout=60):
                if event.chunk.token_ids and not first:
                    first = time.monotonic() - began
            took.append(first)
            if time.monotonic() > until:
                break
        return took

    async def whole(self) -> str:
        """The session of an undisturbed answer."""
        session = ""
        async for event in self.stub.Generate(request(seed=1, **UNREAD)):
            session = event.started.session_id or session
        return session

    async def text(self, session: str) -> str:
        """A session's whole answer, resumed from its beginning; again where the call breaks."""
        while True:
            try:
                call = self.stub.Resume(pb.ResumeRequest(session_id=session), timeout=60)
                return "".join([event.chunk.text async for event in call])
            except grpc.aio.AioRpcError as error:
                known = from_rpc_error(error)
                if not isinstance(known, Unavailable):
                    return f"{known}"
                await asyncio.sleep(0.2)

    @asynccontextmanager
    async def unread(self, count: int) -> AsyncIterator[list[str]]:
        """Calls that are read up to `Started`, and again where they are refused; the sessions of those that began."""
        async with AsyncExitStack() as stack:
            sessions: list[str] = []

            async def begin() -> None:
                options = NARROW
                channel = await stack.enter_async_context(grpc.aio.insecure_channel(self._router.address, options))
                while True:
                    call = InferenceStub(channel).Generate(request(seed=1, **UNREAD))
                    stack.callback(call.cancel)
                    try:
                        sessions.append((await call.read()).started.session_id)
                        return
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(1.0)

            calls = [asyncio.create_task(begin()) for _ in range(count)]
            yield sessions
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    @asynccontextmanager
    async def dripping(self, count: int, window: int) -> AsyncIterator[list[str]]:
        """Calls whose clients allow a byte more each second."""
        async with AsyncExitStack() as stack:
            for _ in range(count):
                client = await stack.enter_async_context(Http2Client(self._router.address, window=window))
                client.call(GENERATE, request(seed=1, **UNREAD).SerializeToString())
                reading = asyncio.create_task(client.drip(1, 1.0))
                stack.callback(reading.cancel)
            yield []

    @asynccontextmanager
    async def vanishing(self, count: int) -> AsyncIterator[list[str]]:
        """Calls whose clients never answer again, pings included."""
        async with AsyncExitStack() as stack:
            for _ in range(count):
                client = await stack.enter_async_context(Http2Client(self._router.address))
                client.call(GENERATE, request(seed=1, **UNREAD).SerializeToString())
            yield []

    @asynccontextmanager
    async def answering(self, count: int, timeout: str) -> AsyncIterator[float]:
        """Calls with a deadline whose clients answer pings and read no more than a first window; when they began."""
        async with AsyncExitStack() as stack:
            began = time.monotonic()
            for _ in range(count):
                client = await stack.enter_async_context(Http2Client(self._router.address))
                client.call(GENERATE, request(seed=1, **UNREAD).SerializeToString(), timeout)
                reading = asyncio.create_task(client.drip(0, 0.0))
                stack.callback(reading.cancel)
            yield began


async def under_way(sessions: Sequence[str]) -> None:
    """Until all slots have a session, and each of them stands still."""
    while len(sessions) < SLOTS:
        await asyncio.sleep(0.02)
    await asyncio.sleep(2.0)


def request(seed: int, **sampling: Any) -> pb.GenerateRequest:
    """A valid request."""
    return pb.GenerateRequest(text=PROMPT, sampling=pb.Sampling(seed=seed, **sampling))


def refused_calls(
    stub: InferenceStub, running: Sequence[str], ended: str, empty: str, closed: str
) -> Iterator[tuple[str, Callable[[], Awaitable[object]]]]:
    """Calls that are refused, or change nothing, without end."""

    def resumed(
        session: str, position: int = 0, offset: int = 0, generation: int = 0
    ) -> Callable[[], Awaitable[object]]:
        resume = pb.ResumeRequest(session_id=session, next_position=position, text_offset=offset, generation=generation)
        return lambda: _read(stub.Resume(resume))

    for number in itertools.count():
        session = running[number % len(running)]
        yield "invalid offset", resumed(session, offset=1_000_000)
        yield "invalid position", resumed(session, position=1)
        yield "huge position", resumed(session, position=2**40)
        yield "early generation", resumed(session, generation=2)
        yield "early resume", resumed(empty)
        yield "late resume", resumed(closed)
        yield "late cancel", lambda: stub.Cancel(pb.CancelRequest(session_id=closed))
        yield "repeated cancel", lambda: stub.Cancel(pb.CancelRequest(session_id=ended))
        yield "repeated close", lambda: stub.CloseSession(pb.CloseSessionRequest(session_id=closed))
        yield "repeated resume", resumed(ended, offset=1)
        yield "foreign session", resumed("0" * 32)


async def _read(call: Any) -> None:
    async for _ in call:
        pass
