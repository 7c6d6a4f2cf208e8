"""Streams of sessions' steps for their owners, wherever the sessions decode."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress

import grpc.aio

from outrider.errors import InternalError, NotFound, OutriderError, Unavailable
from outrider.limits.concurrency_limit import ConcurrencyLimit
from outrider.rpc.backoff import Backoff
from outrider.rpc.status import from_rpc_error
from outrider.rpc.step_broadcast import StepBroadcast
from outrider.store.session_events import SessionEvent
from outrider.store.sessions import SessionRecord, Sessions
from outrider.wire import verifier as wire
from router.requests.requests import find_model
from router.requests.served_models import ServedModel
from router.scheduling.workers import WorkerPool
from router.sessions.context import SessionStore
from router.sessions.takeover import open_record

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 60.0  # between two looks for the verifier of a session that no event is about
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between two attempts to receive events
MAX_WATCHERS, MAX_OF_TENANT = 256, 32

log = logging.getLogger(__name__)


class StepStreams:
    """The watched sessions of a router: each has one stream from its verifier, however many watch it."""

    def __init__(self, *, store: SessionStore, models: Mapping[str, ServedModel], worker_pool: WorkerPool) -> None:
        self._store = store
        self._models = models
        self._worker_pool = worker_pool
        self._watched: dict[str, _WatchedSession] = {}
        most = f"at most {MAX_OF_TENANT} of a tenant and {MAX_WATCHERS} in all"
        problem = f"too many sessions are watched here ({most}); end a watch first"
        self._watchers = ConcurrencyLimit(problem, MAX_WATCHERS, of_key=MAX_OF_TENANT)
        self._any_watched = asyncio.Event()

    async def steps(self, tenant: str, session_id: str) -> AsyncGenerator[wire.StepTree, None]:
        """Yield the steps of a tenant's session from now on, generation after generation, until it is closed.

        Raises NotFound, and Overloaded where the tenant or all tenants watch too much.
        """
        with self._watchers.hold(tenant):
            record = await open_record(self._store.sessions, tenant, session_id)
            watched = self._watched.get(session_id)
            if watched is None or watched.ended:
                watched = self._watched[session_id] = _WatchedSession(
                    record, self._store.sessions, find_model(record.model, self._models), self._worker_pool
                )
            self._any_watched.set()
            try:
                async with aclosing(watched.steps()) as steps:
                    async for step in steps:
                        yield step
            finally:
                if watched.ended and self._watched.get(session_id) is watched:
                    del self._watched[session_id]

    async def run(self) -> None:
        """Pass events on to the watched sessions that they are about, until cancelled."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            await self._any_watched.wait()
            try:
                async with aclosing(self._store.events.listen()) as events:
                    async for event in events:
                        backoff.attempts = 0
                        self._pass_on(event)
                        if not self._watched:
                            self._any_watched.clear()
                            break
            except Unavailable as error:
                log.debug("%s", error)
                await backoff.wait()

    def _pass_on(self, event: SessionEvent | None) -> None:
        if event is None:  # events may have been missed
            for watched in self._watched.values():
                watched.look()
        elif (about := self._watched.get(event.session_id)) is not None:
            about.look(event.verifier)


class _WatchedSession:
    """One session's steps, which are read once and given to all its watchers. Only its own tenant can watch it."""

    def __init__(self, record: SessionRecord, sessions: Sessions, model: ServedModel, worker_pool: WorkerPool) -> None:
        self._record = record
        self._sessions = sessions
        self._model = model
        self._worker_pool = worker_pool
        self._broadcast = StepBroadcast()
        self._task: asyncio.Task[None] | None = None
        self._event = asyncio.Event()
        self._verifier = ""  # where the latest event has it decode; "": its record has to be read

    @property
    def ended(self) -> bool:
        """Whether there is no watcher any more, or no further step."""
        return self._broadcast.closed

    async def steps(self) -> AsyncGenerator[wire.StepTree, None]:
        """Yield the steps from now on. Raises what ended them: NotFound once the session is closed."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            async with aclosing(self._broadcast.steps()) as steps:
                async for step in steps:
                    yield step
        finally:
            if not self._broadcast.watched:
                self._broadcast.close()
                self._task.cancel()

    def look(self, verifier: str = "") -> None:
        """Look for its steps: at a verifier, or where its record has it decode if it is not closed."""
        self._verifier = verifier
        self._event.set()

    async def _run(self) -> None:
        try:
            async for step in self._read():
                self._broadcast.show(step)
        except OutriderError as error:
            self._broadcast.close(error)
        except Exception as error:
            self._broadcast.close(InternalError(f"the session's steps cannot be read: {error}"))
            raise

    async def _read(self) -> AsyncIterator[wire.StepTree]:
        token_text = self._model.token_text
        backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
        verifier = self._record.verifier
        while True:
            async for step in self._read_from(verifier):
                backoff.attempts = 0
                step.texts.extend(map(token_text, step.tokens))
                step.committed_texts.extend(map(token_text, step.committed))
                yield step
            verifier = await self._next_verifier(backoff)

    async def _next_verifier(self, backoff: Backoff) -> str:
        """Wait for an event, or for the next pause of `backoff`: a verifier may be unreachable for a moment, an event
        may be lost, and a session that expires has none. Raises NotFound once the session is closed or has expired."""
        with suppress(TimeoutError):
            async with asyncio.timeout(backoff.next_s):
                await self._event.wait()
        backoff.attempts += 1
        if self._event.is_set():
            self._event.clear()
            backoff.attempts = 0
            if self._verifier:
                return self._verifier
        record = await open_record(self._sessions, self._record.tenant, self._record.session_id)
        return record.verifier

    async def _read_from(self, worker_id: str) -> AsyncIterator[wire.StepTree]:
        """Yield the steps of the session at one verifier, as long as it is there."""
        worker = next((one for one in self._worker_pool.listed if one.worker_id == worker_id), None)
        if worker is None:
            return
        stub = wire.VerifierStub(self._worker_pool.channels.to(worker))
        call = stub.Watch(wire.WatchRequest(session_id=self._record.session_id))
        try:
            async for step in call:
                if step is None:  # gRPC gives None for bytes that do not parse
                    raise Unavailable(f"verifier {worker_id} has sent bytes that are no message")
                yield step
        except grpc.aio.AioRpcError as error:
            known = from_rpc_error(error)
            if not isinstance(known, NotFound | Unavailable):
                raise known from None
        finally:
            call.cancel()
