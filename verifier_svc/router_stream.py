"""One router's Decode stream: all generations of the router at this verifier.

What a step commits for them goes out in one message. A generation that fails ends alone; what is malformed beyond one
generation ends the stream. A router that is slow to read delays its own generations alone, each within its window.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from outrider.core.session.contract import FinishReason, Plan
from outrider.core.session.decoding import PromptScores
from outrider.errors import InternalError, InvalidRequest, Moved, OutriderError, Overloaded, Superseded, Unavailable
from outrider.rpc import liveness
from outrider.rpc.status import error_to_pb
from outrider.rpc.tracing import ServedCall, server_span
from outrider.telemetry.logs import session_context
from outrider.telemetry.tracing import Attributes
from outrider.wire import verifier as wire
from outrider.wire.message_bounds import MAX_TOGETHER
from outrider.wire.types import plan_from_pb, reason_to_pb, report_to_pb
from verifier_svc.commit_queue import StepCommit
from verifier_svc.open_sessions import SHUTTING_DOWN
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import VerifierSession
from verifier_svc.tracing import TracedSteps

MAX_GENERATIONS = 1024  # of one router
MESSAGE_BYTES = 2**20  # from this many bytes of log-probabilities on, the rest waits for the next message

log = logging.getLogger(__name__)


class SessionOpener(Protocol):
    """What a stream needs of the service."""

    async def open_session(self, start: wire.DecodeStart) -> VerifierSession:
        """Check a start and open its session. Raises what its router is sent."""

    def replan(self, session: VerifierSession, plan: Plan) -> None:
        """Have a session follow a newer plan."""

    def attributes(self, session: VerifierSession) -> Attributes:
        """Return what the span of a traced session has."""


class RouterStream:
    """The generations that a router has begun on one stream."""

    def __init__(self, opener: SessionOpener, scheduler: StepScheduler) -> None:
        self._opener = opener
        self._scheduler = scheduler
        self._generations: dict[int, _Generation] = {}  # by handle
        self._changed: dict[_Generation, None] = {}  # have something to send, in this order
        self._message = wire.DecodeResponse()  # the next one, without commits
        self._wake = asyncio.Event()
        self._received = time.monotonic()  # when the router sent its latest message

    async def run(
        self, requests: AsyncIterator[wire.DecodeRequest], send: Callable[[wire.DecodeResponse], Awaitable[None]]
    ) -> None:
        """Serve until the router closes its side, or until all has ended and the verifier goes down. However this ends,
        all sessions are closed, and their KV stays.

        Raises InvalidRequest for a message that is malformed beyond one generation, Unavailable when a router without
        generations is silent.
        """
        reading = asyncio.create_task(self._read(requests))
        reading.add_done_callback(lambda _: self._wake.set())
        try:
            while not reading.done() and not (self._scheduler.sessions.draining and not self._generations):
                await self._wait()
                await send(self._take())
            if reading.done():
                reading.result()
        finally:
            tasks = [reading, *(generation.task for generation in self._generations.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self) -> None:
        """Wait until something is to be sent, at most until the next heartbeat. End generations of a silent router."""
        due = time.monotonic() + liveness.HEARTBEAT_S
        with suppress(TimeoutError):
            async with asyncio.timeout(liveness.HEARTBEAT_S):
                await self._wake.wait()
        self._wake.clear()
        now = time.monotonic()
        if now - due > liveness.HEARTBEAT_S:  # this process itself stood still
            self._received = now
        silent = now - self._received
        for generation in self._generations.values():
            if silent > generation.lease_s:
                generation.fail(_silent_router(generation.lease_s))
        if silent > liveness.SILENCE_S and not self._generations:
            raise _silent_router(liveness.SILENCE_S)

    def _take(self) -> wire.DecodeResponse:
        """Return the next message: all that has not been sent yet, or a heartbeat."""
        message, self._message = self._message, wire.DecodeResponse()
        size = 0
        while self._changed and size < MESSAGE_BYTES and len(message.commits) < MAX_TOGETHER:
            generation = next(iter(self._changed))
            size += generation.take(message)
            if not generation.unsent:
                del self._changed[generation]
        if self._changed:
            self._wake.set()
        if not message.ByteSize():
            message.heartbeat.CopyFrom(self._scheduler.progress.heartbeat())
        return message

    async def _read(self, requests: AsyncIterator[wire.DecodeRequest]) -> None:
        async for request in requests:
            self._received = time.monotonic()
            if request.HasField("start"):
                self._begin(request.start)
            if len(request.acknowledged) != len(request.durable):
                raise InvalidRequest("durable", f"{len(request.durable)}, for {len(request.acknowledged)} generations")
            for handle, durable in zip(request.acknowledged, request.durable, strict=True):
                if (generation := self._generations.get(handle)) is not None:
                    generation.acknowledge(durable)
            if request.durable:
                self._scheduler.wake()
            for change in request.plans:
                if (generation := self._generations.get(change.handle)) is not None:
                    self._replan(generation, change.plan)
            for handle in request.cancelled:
                if (generation := self._generations.pop(handle, None)) is not None:
                    generation.over.set()  # no commit of it is sent any more
                    generation.task.cancel()

    def _begin(self, start: wire.DecodeStart) -> None:
        if not start.handle or start.handle in self._generations:
            raise InvalidRequest("handle", f"is {start.handle}, must not be 0 and is used once")
        generation = _Generation(start)
        if len(self._generations) >= MAX_GENERATIONS:
            self._end(generation, Overloaded(f"a router has at most {MAX_GENERATIONS} generations here"))
            return
        self._generations[start.handle] = generation
        generation.task = asyncio.create_task(self._serve(generation, start))

    async def _serve(self, generation: _Generation, start: wire.DecodeStart) -> None:
        """Serve one generation: open its session, and close it at the end."""
        try:
            with session_context(start.session_id):
                async with server_span(_Caller(start), "outrider.v1.Verifier/Decode") as call:
                    await self._decode(generation, await self._opener.open_session(start), call)
        except OutriderError as error:
            self._end(generation, error)
        except Exception:
            log.exception("a generation failed")
            self._end(generation, InternalError("an internal error; the verifier's log has the details"))
        finally:
            if self._generations.get(generation.handle) is generation:
                del self._generations[generation.handle]
                self._wake.set()

    async def _decode(self, generation: _Generation, session: VerifierSession, call: ServedCall) -> None:
        """Have the session's commits sent until it ends. Raises why it ended, unless by its contract."""
        try:
            if call.span.is_recording():
                session.traced = TracedSteps(call.span)
                call.span.set_attributes(self._opener.attributes(session))
            self._message.started.add(
                handle=generation.handle, cached=session.kv_slot.cached, resting=session.terms.resting
            )
            generation.session = session
            session.commits.on_change = partial(self._mark, generation)
            self._mark(generation)
            await generation.over.wait()
        finally:
            self._scheduler.sessions.close(session)
        if generation.error is not None:
            raise generation.error
        call.completed = True

    def _mark(self, generation: _Generation) -> None:
        if not generation.over.is_set():
            self._changed[generation] = None
            self._wake.set()

    def _end(self, generation: _Generation, error: OutriderError) -> None:
        self._message.ended.add(handle=generation.handle, error=error_to_pb(error))
        self._wake.set()

    def _replan(self, generation: _Generation, message: wire.Plan) -> None:
        try:
            plan = plan_from_pb(message)
        except InvalidRequest as error:
            generation.fail(error)
            return
        session = generation.session
        if session is not None and plan.version > session.terms.plan.version:
            self._opener.replan(session, plan)


class _Generation:
    """One generation of a stream."""

    task: asyncio.Task[None]

    def __init__(self, start: wire.DecodeStart) -> None:
        self.handle = start.handle
        self.lease_s = start.lease_ms / 1000
        self.session: VerifierSession | None = None  # None until it has a slot
        self.over = asyncio.Event()  # all of its commits are in a message, or it fails
        self.error: OutriderError | None = None  # why it ended; None: by its contract

    def fail(self, error: OutriderError) -> None:
        """End with an error, once its session has been opened."""
        if not self.over.is_set():
            self.error = error
            self.over.set()

    def acknowledge(self, durable: int) -> None:
        """Take over how far the router's log is."""
        committed = 0 if self.session is None else len(self.session.tokens)
        if durable > committed:
            self.fail(InvalidRequest("durable", f"is {durable}, only {committed} are committed"))
        elif self.session is not None:
            self.session.commits.acknowledge(durable)

    @property
    def unsent(self) -> bool:
        """Whether something has to be sent that is in no message yet."""
        return self.session is not None and not self.over.is_set() and not self.session.commits.empty()

    def take(self, message: wire.DecodeResponse) -> int:
        """Move the session's commits, and then its end, into a message, up to MAX_TOGETHER commits. Return the bytes of
        log-probabilities."""
        session, size = self.session, 0
        if session is None:
            return 0
        while self.unsent and len(message.commits) < MAX_TOGETHER:
            commit = session.commits.get_nowait()
            if commit is None:
                self.fail(_why_closed(session))
                break
            if isinstance(commit, PromptScores):
                size += len(commit.logprobs)
                message.scores.add(
                    handle=self.handle,
                    epoch=session.epoch,
                    position=commit.position,
                    logprobs=commit.logprobs,
                    ranks=commit.ranks,
                )
                continue
            size += _add(message, self.handle, session.epoch, commit)
            if commit.last:
                stopped = session.tokens[-1] in session.contract.stop_ids
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                message.ended.add(handle=self.handle, reason=reason_to_pb(reason))
                self.over.set()
                break
        return size


class _Caller:
    """What a span takes from a gRPC call's context."""

    def __init__(self, start: wire.DecodeStart) -> None:
        self._trace = tuple(start.trace.items())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._trace

    def time_remaining(self) -> None:
        return None  # the router keeps the deadline


def _silent_router(for_s: float) -> Unavailable:
    """Return what a router is sent that was silent: not Stalled, which is what it would say of this verifier."""
    return Unavailable(str(liveness.silent("the router", for_s)))


def _why_closed(session: VerifierSession) -> OutriderError:
    if session.commits.failure is not None:
        return session.commits.failure
    if session.commits.fenced:
        return Superseded(f"session {session.id} was taken over under a higher epoch")
    return Moved(SHUTTING_DOWN)


def _add(message: wire.DecodeResponse, handle: int, epoch: int, commit: StepCommit) -> int:
    """Add a commit to a message. Return the bytes of its log-probabilities."""
    choices = commit.choices
    logprobs = b"".join(choice.logprobs for choice in choices)
    message.commits.add(
        handle=handle,
        epoch=epoch,
        position=commit.position,
        tokens=[choice.token for choice in choices],
        gaps=[choice.gap for choice in choices],
        digest=commit.digest,
        report=report_to_pb(commit.report),
        logprobs=logprobs,
        contributions=[
            wire.DrafterContribution(
                drafter_id=each.drafter_id,
                verified=each.verified,
                accepted=each.accepted,
                alone=each.alone,
            )
            for each in commit.contributions
        ],
    )
    return len(logprobs)
