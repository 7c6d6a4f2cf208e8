"""Streams of sessions' steps for their owners, wherever the sessions decode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc.aio

from outrider.core.concurrency_limit import ConcurrencyLimit
from outrider.errors import InternalError, NotFound, OutriderError, Unavailable
from outrider.rpc.backoff import Backoff
from outrider.rpc.status import from_rpc_error
from outrider.rpc.step_broadcast import StepBroadcast
from outrider.store.sessions import SessionRecord
from outrider.v1 import types_pb2, verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierStub
from router.api.requests import find_model
from router.sessions.session_open import RouterContext, open_record

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0  # between two looks for the verifier that decodes a session
MAX_WATCHERS, MAX_OF_TENANT = 256, 32


class StepStreams:
    """The watched sessions of a router: each has one stream from its verifier, however many watch it."""

    def __init__(self, router: RouterContext) -> None:
        self._router = router
        self._watched: dict[str, _WatchedSession] = {}
        most = f"at most {MAX_OF_TENANT} of a tenant and {MAX_WATCHERS} in all"
        problem = f"too many sessions are watched here ({most}); end a watch first"
        self._watchers = ConcurrencyLimit(problem, MAX_WATCHERS, of_key=MAX_OF_TENANT)

    async def steps(self, tenant: str, session_id: str) -> AsyncGenerator[types_pb2.StepTree, None]:
        """Yield the steps of a tenant's session from now on, generation after generation, until it is closed.

        Raises NotFound, and Overloaded where the tenant or all tenants watch too much.
        """
        with self._watchers.hold(tenant):
            record = await open_record(self._router.sessions, tenant, session_id)
            watched = self._watched.get(session_id)
            if watched is None or watched.ended:
                watched = self._watched[session_id] = _WatchedSession(self._router, record)
            try:
                async with aclosing(watched.steps()) as steps:
                    async for step in steps:
                        yield step
            finally:
                if watched.ended and self._watched.get(session_id) is watched:
                    del self._watched[session_id]

    def on_begin(self, session_id: str) -> None:
        """A generation of the session begins here: its verifier is known in a moment."""
        if session_id in self._watched:
            self._watched[session_id].begun.set()


class _WatchedSession:
    """One session's steps, which are read once and given to all its watchers. Only its own tenant can watch it."""

    def __init__(self, router: RouterContext, record: SessionRecord) -> None:
        self.begun = asyncio.Event()  # set when a generation begins at this router
        self._router = router
        self._record = record
        self._broadcast = StepBroadcast()
        self._task: asyncio.Task[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether there is no watcher any more, or no further step."""
        return self._broadcast.closed

    async def steps(self) -> AsyncGenerator[types_pb2.StepTree, None]:
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

    async def _run(self) -> None:
        try:
            async for step in self._read():
                self._broadcast.show(step)
        except OutriderError as error:
            self._broadcast.close(error)
        except Exception as error:
            self._broadcast.close(InternalError(f"the session's steps cannot be read: {error}"))
            raise

    async def _read(self) -> AsyncIterator[types_pb2.StepTree]:
        sessions, record = self._router.sessions, self._record
        token_text = find_model(record.model, self._router.models).token_text
        backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
        while True:
            async for step in self._read_from(record.verifier):
                backoff.attempts = 0
                step.texts.extend(map(token_text, step.tokens))
                step.committed_texts.extend(map(token_text, step.committed))
                yield step
            await self._wait(backoff)
            record = await open_record(sessions, record.tenant, record.session_id)

    async def _wait(self, backoff: Backoff) -> None:
        """Wait until the session may decode again: soon after a generation began here, and now and then, because it may
        begin at another router."""
        pause = asyncio.create_task(backoff.wait())
        begun = asyncio.create_task(self.begun.wait())
        try:
            await asyncio.wait({pause, begun}, return_when=asyncio.FIRST_COMPLETED)
            if self.begun.is_set():
                self.begun.clear()
                backoff.attempts = 0
        finally:
            pause.cancel()
            begun.cancel()

    async def _read_from(self, worker_id: str) -> AsyncIterator[types_pb2.StepTree]:
        """Yield the steps of the session at one verifier, as long as it is there."""
        worker = next((one for one in self._router.worker_pool.listed if one.worker_id == worker_id), None)
        if worker is None:
            return
        stub = VerifierStub(self._router.worker_pool.channel(worker))
        call = stub.Watch(verifier_pb2.WatchRequest(session_id=self._record.session_id))
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
