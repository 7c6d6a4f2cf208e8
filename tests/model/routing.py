"""A router: the real one, on a loop that is turned by hand, with stand-ins where gRPC and the fleet would be."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider import errors
from outrider.config import RouterConfig
from outrider.core.control.depth.goodput import AcceptancePriors
from outrider.core.control.drafters.tier_selection import TierSwitch
from outrider.core.session.contract import Plan
from outrider.core.session.decoding import DecodeStart, ReceivedCommit
from outrider.core.session.speculation_status import SpeculationStatus
from outrider.errors import OutriderError, Unavailable
from outrider.rpc.status import CLASS_KEY
from outrider.store.adapters import NamedAdapters
from outrider.store.registry import Worker
from outrider.v1 import inference_pb2 as pb
from outrider.wire.tickets import TicketSigner
from router.api.auth import run_for
from router.api.servicer import GenerateServicer
from router.background import BackgroundTasks
from router.counters.request_metrics import RouterMetrics
from router.drafters.attached_drafters import DraftAssignment
from router.drafters.warm_start import WarmStart
from router.requests.served_models import ServedModel
from router.scheduling.adapters import AdapterDirectory
from router.scheduling.admission import Admission
from router.sessions.context import DecodeResources, RouterContext, SessionStore
from router.sessions.sample_writer import SampleWriter
from router.sessions.verifier_client import DecodeEnd, DecodeIdle
from tests.model.loop import Clock, HandLoop
from tests.model.redis import Redis, Sessions, Violation
from tests.model.wires import BROKEN, Ended, Link

ROOM = 2  # messages that wait for a client which does not read

Dial = Callable[[str, Callable[[Any], None]], Link]


@dataclass(frozen=True, slots=True)
class Durable:
    """To a verifier: everything below this is in the log."""

    position: int


@dataclass(frozen=True, slots=True)
class Started:
    """From a verifier: the session has a place."""


@dataclass(frozen=True, slots=True)
class Note:
    """To a drafter, from a router: draft here, or stop."""

    post: DraftAssignment
    attach: bool


class Call:
    """A client's call as a handler sees it: what `GenerateServicer` uses of a ServicerContext."""

    def __init__(self, link: Link, loop: HandLoop) -> None:
        self._link = link
        self._loop = loop
        self._room: asyncio.Future[None] | None = None
        link.back.moved = self._moved

    async def write(self, message: Any) -> None:
        """Waits while the client does not read. A broken call swallows what is written until it is known to be."""
        while self._link.back.open and len(self._link.back.items) >= ROOM:
            self._room = self._loop.create_future()
            await self._room
        self._link.back.put(message)

    async def abort(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...]) -> None:
        self._link.end(Ended(dict(metadata)[CLASS_KEY], details))
        raise grpc.aio.AbortError

    def time_remaining(self) -> float | None:
        return None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def _moved(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
            self._loop.settle()


class Decoding:
    """What a router has for `router.sessions.verifier_client.DecodeStream`; `dial` is the fleet's channel."""

    def __init__(self, worker: Worker, dial: Dial, start: DecodeStart) -> None:
        self.worker = worker
        self.opened = False
        self.cached = 0
        self.resting = False
        self._start = start
        self._durable = len(start.tokens)
        self._loop = _loop()
        self._events: deque[Any] = deque()
        self._pending: asyncio.Future[None] | None = None
        self._cancelled = False
        self._link = dial(worker.worker_id, self._receive)

    async def open(self) -> None:
        self._link.forth.put(self._start)
        if not isinstance(await self._read(), Started):
            raise Violation("a verifier did not begin with DecodeStarted")
        self.opened = True

    async def next(self) -> ReceivedCommit | DecodeEnd | DecodeIdle:
        event = await self._read()
        assert isinstance(event, ReceivedCommit | DecodeEnd | DecodeIdle)
        if isinstance(event, ReceivedCommit) and event.epoch != self._start.epoch:
            raise Violation(f"epoch {event.epoch} on a stream of epoch {self._start.epoch}")
        return event

    def acknowledge(self, position: int) -> None:
        if position > self._durable:
            self._durable = position
            self._link.forth.put(Durable(position))

    def plan(self, plan: Plan) -> None:
        self._link.forth.put(plan)

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._link.leave()
            if self._pending is not None:
                self._pending.cancel()

    async def _read(self) -> Any:
        if self._cancelled:
            raise asyncio.CancelledError
        if not self._events:
            self._pending = self._loop.create_future()
            await self._pending
        event = self._events.popleft()
        if isinstance(event, Ended):
            self._events.append(event)
            raise error_of(event)
        return event

    def _receive(self, event: Any) -> None:
        self._events.append(event)
        if self._pending is not None and not self._pending.done():
            self._pending.set_result(None)
            self._loop.settle()


class Attaching:
    """What a router has for `router.drafters.drafter_assignment.DrafterSet`: sends its note, and does not wait."""

    drafter_ids: tuple[str, ...] = ()
    obstacle: SpeculationStatus | None = None

    def __init__(
        self, fleet: Fleet, background: BackgroundTasks, post: DraftAssignment, *terms: Any, **more: Any
    ) -> None:
        self._fleet, self._post = fleet, post
        fleet.send(Note(post, attach=True))

    def observe(self, tokens: int, report: Any, contributions: tuple[Any, ...] = ()) -> None:
        pass

    def estimates(self) -> dict[str, float]:
        return {}

    def detach_all(self) -> None:
        self._fleet.send(Note(self._post, attach=False))


class Fleet:
    """What a router has for `WorkerPool` and for `VerifierLinks`: all workers are listed, dead or alive."""

    def __init__(self, workers: Iterable[Worker], dial: Dial, send: Callable[[Note], None]) -> None:
        self._workers = list(workers)
        self._dial = dial
        self._suspects: set[str] = set()
        self.send = send

    async def serving(self, model: str) -> list[Worker]:
        return sorted(self._workers, key=self.suspected)

    def to(self, worker: Worker) -> Dial:
        return self._dial

    def add_session(self, worker: Worker) -> None:
        self._suspects.discard(worker.worker_id)

    def remove_session(self, worker: Worker, stayed_s: float = 0.0) -> None:
        pass

    def suspected(self, worker: Worker) -> bool:
        return worker.worker_id in self._suspects

    def on_failure(self, worker: Worker, error: OutriderError) -> None:
        self._suspects = {worker.worker_id}

    def serves(self, model: str) -> bool:
        return True

    async def listing_change(self, within_s: float) -> None:
        """The list never changes."""
        await asyncio.sleep(within_s)

    def capacity(self, model: str) -> int | None:
        return None

    def longest_context(self, model: str) -> int:
        return 0

    def rank_verifiers(self, workers: list[Worker], holder: str, tokens: list[int], tenant: str) -> list[Worker]:
        return sorted(workers, key=lambda worker: self.suspected(worker) or worker.worker_id != holder)


class _Background(BackgroundTasks):
    """Records the errors that are bugs."""

    def __init__(self, trouble: list[str]) -> None:
        super().__init__()
        self._trouble = trouble

    def _done(self, task: asyncio.Task[None]) -> None:
        super()._done(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OutriderError):
            self._trouble.append(repr(error))


class _NoEvents:
    """Nobody watches."""

    async def publish(self, *arguments: Any) -> None:
        pass


class _UnlimitedStorage:
    """What a tenant keeps is neither counted nor bounded."""

    bounded = False

    async def reserve(self, *arguments: Any, **options: Any) -> None:
        pass

    async def forget(self, *arguments: Any) -> None:
        pass


class Router:
    """One router process."""

    def __init__(
        self, name: str, clock: Clock, redis: Redis, model: ServedModel, config: RouterConfig, fleet: Fleet
    ) -> None:
        self.name = name
        self.trouble: list[str] = []
        self.loop = HandLoop(clock, self._failed)
        self._fleet = fleet
        self.inference = GenerateServicer(
            RouterContext(
                models={model.name: model},
                admission=Admission(config, fleet.capacity, clock=lambda: clock.now),
                store=SessionStore(
                    router_id=name,
                    sessions=Sessions(redis, self.loop),  # type: ignore[arg-type]
                    events=_NoEvents(),  # type: ignore[arg-type]
                    storage=_UnlimitedStorage(),  # type: ignore[arg-type]
                    responses=_NoEvents(),  # type: ignore[arg-type]
                    clock=SimpleNamespace(now=lambda: clock.now),  # type: ignore[arg-type]
                ),
                decoding=DecodeResources(
                    config=config,
                    worker_pool=fleet,  # type: ignore[arg-type]
                    verifier_links=fleet,  # type: ignore[arg-type]
                    tiers=TierSwitch(),
                    ticket_signer=TicketSigner(time.time),
                    sample_writer=SampleWriter(redis, ()),  # type: ignore[arg-type]
                    metrics=RouterMetrics(),
                    background=_Background(self.trouble),
                ),
                warm_start=WarmStart(_share_nothing, lambda _: ()),
                adapters=AdapterDirectory(
                    {model.name: model},
                    NamedAdapters(redis),  # type: ignore[arg-type]
                    fleet,  # type: ignore[arg-type]
                    (),
                ),
            ),
        )
        self._calls: dict[Link, asyncio.Task[Any]] = {}

    def receive(self, link: Link, message: Any) -> None:
        """A client's request, or the end of its call."""
        if isinstance(message, Ended):
            task = self._calls.pop(link, None)
            if task is not None:
                task.cancel()
        else:
            self._calls[link] = self.loop.start(self._serve(link, message))
        self.loop.settle()

    def crash(self) -> None:
        """Forgets everything."""
        self._calls.clear()
        self.loop.kill()

    async def _serve(self, link: Link, request: Any) -> None:
        call: Any = Call(link, self.loop)
        handlers: dict[type[Any], Callable[[Any, Any], Coroutine[Any, Any, Any]]] = {
            pb.GenerateRequest: self.inference.Generate,
            pb.ResumeRequest: self.inference.Resume,
            pb.CancelRequest: self.inference.Cancel,
        }
        run_for("")
        try:
            reply = await handlers[type(request)](request, call)
            if reply is not None:
                link.back.put(reply)
            link.end(Ended())
        except grpc.aio.AbortError:
            pass
        finally:
            self._calls.pop(link, None)

    def _failed(self, context: dict[str, Any]) -> None:
        self.trouble.append(f"{context.get('message')}: {context.get('exception')!r}")


def error_of(ended: Ended) -> OutriderError:
    """What a caller raises."""
    if ended is BROKEN or ended.error in ("", "Cancelled"):
        return Unavailable(ended.details or "the call ended early")
    kind = getattr(errors, ended.error)
    return kind(ended.details) if kind is not errors.InvalidRequest else kind("request", ended.details)


async def _share_nothing(name: str, priors: AcceptancePriors) -> None:
    """Shares nothing."""


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Puts the stand-ins where the router's modules look for the real ones; time and names are the model's own."""
    clock = SimpleNamespace(time=lambda: _loop().clock.now, monotonic=lambda: _loop().clock.now)
    for module in (
        "sessions.session_open",
        "sessions.takeover",
        "sessions.commit_pump",
        "sessions.decode_attempts",
        "sessions.verifier_stream",
        "sessions.token_log",
        "api.servicer",
        "counters.usage_stats",
    ):
        patch.setattr(f"router.{module}.time", clock)
    for module in ("session_open", "context"):
        names = SimpleNamespace(token_hex=lambda size: _loop().clock.name())
        patch.setattr(f"router.sessions.{module}.secrets", names)
    patch.setattr("router.sessions.verifier_stream.DecodeStream", Decoding)
    patch.setattr("router.sessions.commit_pump.DrafterSet", Attaching)


def _loop() -> HandLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, HandLoop)
    return loop
