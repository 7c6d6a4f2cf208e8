"""The router's end of one generation on a verifier."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from outrider.core.session.contract import Plan
from outrider.core.session.decoding import SCORED_AHEAD, DecodeStart, PromptScores, ReceivedCommit
from outrider.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Moved,
    OutriderError,
    Stalled,
    Unavailable,
)
from outrider.rpc.status import error_from_pb
from outrider.store.registry import Worker
from outrider.telemetry.tracing import trace_metadata
from outrider.wire import verifier as wire
from router.sessions.verifier_link import LinkEvent, VerifierLink

DEADLINE_SLACK_S = 0.05  # behind a deadline, at which gRPC ends the call of a client that is there: it gets that error
ACKS_PER_WINDOW = 4  # each costs as much as a chunk to the client, and the verifier needs few

log = logging.getLogger(__name__)


class DecodeEnd:
    """The generation has ended by its contract."""


class DecodeIdle:
    """The verifier is alive and has sent nothing for a while."""


DecodeEvent: TypeAlias = ReceivedCommit | PromptScores | DecodeEnd | DecodeIdle


class DecodeStream:
    """One session on one verifier, from `open` to `cancel` or the end."""

    def __init__(self, worker: Worker, link: VerifierLink, start: DecodeStart) -> None:
        self.worker = worker
        self.opened = False
        self.resting = False  # whether the verifier wanted no drafters when the stream opened
        self.cached = 0  # tokens whose KV the verifier had when the stream opened
        self._link = link
        self._start = start
        self._began = time.monotonic()
        self._resumed = len(start.tokens) > start.answer_position  # with a response that another verifier began
        scores = 0 < start.scored < start.answer_position
        # The position that the verifier was sent as durable, or up to which the prompt's log-probabilities are here.
        self._acknowledged = start.scored if scores else len(start.tokens)
        self._events: deque[DecodeEvent] = deque()  # bounded by the window, or by SCORED_AHEAD
        self._error: BaseException | None = None  # raised once the events have been read
        self._changed = asyncio.Event()
        self._handle = 0  # on the link; 0: not begun
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def lost(self) -> bool:
        """Whether the verifier was there and was lost, maybe by what it was sent."""
        return self._link.closed and self._link.connected

    async def open(self) -> None:
        """Send the start and wait until the verifier has given the session a KV slot.

        Raises what the verifier answers: Unavailable and Overloaded mean that another verifier may be tried.
        """
        if self._error is None:
            self._handle = self._link.begin(self.receive, wire.start_to_pb(self._start, trace_metadata()))
            if self._start.timeout_s is not None:
                loop, error = asyncio.get_running_loop(), DeadlineExceeded("the generation's deadline has passed")
                self._deadline = loop.call_later(self._start.timeout_s + DEADLINE_SLACK_S, self._fail, error)
        await self._wait(lambda: self.opened)

    async def next(self) -> DecodeEvent:
        """Return the next event. Raises Unavailable when the verifier failed, Moved when it is draining,
        DeadlineExceeded at the deadline."""
        await self._wait(lambda: bool(self._events))
        event = self._events.popleft()
        if self._resumed and isinstance(event, ReceivedCommit):
            self._log_resume_cost()
        return event

    def acknowledge(self, position: int) -> None:
        """Allow the verifier to commit a window beyond `position`: every token below it is in the log. An
        acknowledgement is sent ACKS_PER_WINDOW times in each window."""
        if position - self._acknowledged >= max(1, self._start.window // ACKS_PER_WINDOW):
            self._acknowledged = position
            self._link.acknowledge(self._handle, position)

    def plan(self, plan: Plan) -> None:
        """Send a new plan; of several unsent plans only the latest is sent."""
        self._link.plan(self._handle, plan)

    def cancel(self) -> None:
        """End the generation at the verifier, which starts no further step for it. A pending `next` raises
        CancelledError."""
        self._events.clear()
        self._fail(asyncio.CancelledError())
        self._link.end(self._handle)
        if self._deadline is not None:
            self._deadline.cancel()

    def receive(self, event: LinkEvent) -> None:
        """Take what the link has for this generation."""
        match event:
            case wire.DecodeStarted():
                self.opened, self.cached, self.resting = True, event.cached, event.resting
                self._changed.set()
            case wire.DecodeCommit() | wire.PromptScores():
                try:
                    self._add(self._commit(event) if isinstance(event, wire.DecodeCommit) else self._scores(event))
                except OutriderError as error:
                    self._fail(error)
            case wire.DecodeEnded() if event.WhichOneof("how") == "reason":
                self._add(DecodeEnd())
            case wire.DecodeEnded():
                self._fail(self._translated(error_from_pb(event.error)))
            case OutriderError():
                self._fail(self._translated(event))
            case None:
                if self.opened and not self._events:
                    self._add(DecodeIdle())

    def _add(self, event: DecodeEvent) -> None:
        if not self.opened:
            self._fail(self._failure("did not begin with DecodeStarted"))
        if self._error is None:  # nothing counts behind an error
            self._events.append(event)
            self._changed.set()

    def _fail(self, error: BaseException) -> None:
        """Have `open` and `next` raise an error once the events have been read. Of several the first one counts."""
        if self._error is None:
            self._error = error
            self._changed.set()

    async def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if isinstance(self._error, OutriderError):
                raise self._error
            if self._error is not None:
                raise asyncio.CancelledError
            self._changed.clear()
            await self._changed.wait()

    def _log_resume_cost(self) -> None:
        self._resumed = False
        reread, took = len(self._start.tokens) - self.cached, time.monotonic() - self._began
        where = self.worker.worker_id
        log.info("session %s goes on at %s: %d tokens read again, %.3f s", self._start.session_id, where, reread, took)

    def _commit(self, commit: wire.DecodeCommit) -> ReceivedCommit:
        durable = max(self._acknowledged, self._start.answer_position)
        if commit.position + len(commit.tokens) > durable + self._start.window:
            raise self._failure(f"committed more than {self._start.window} tokens beyond the durable ones")
        if commit.epoch != self._start.epoch:
            raise self._failure(f"committed under epoch {commit.epoch}, not {self._start.epoch}")
        try:
            return wire.commit_from_pb(commit)
        except InvalidRequest as error:
            raise self._failure(f"sent a malformed commit ({error})") from None

    def _scores(self, scores: wire.PromptScores) -> PromptScores:
        if scores.position + len(scores.ranks) > self._acknowledged + SCORED_AHEAD:
            raise self._failure(f"sent more than {SCORED_AHEAD} log-probabilities beyond the acknowledged ones")
        if scores.epoch != self._start.epoch:
            raise self._failure(f"sent log-probabilities under epoch {scores.epoch}, not {self._start.epoch}")
        return wire.scores_from_pb(scores)

    def _translated(self, error: OutriderError) -> OutriderError:
        if isinstance(error, Moved):
            return error
        # This side did not cancel: the verifier is draining.
        if isinstance(error, Unavailable | Cancelled | InternalError):
            failure = self._failure(f"failed ({error})")
            return Stalled(str(failure)) if isinstance(error, Stalled) else failure
        return error

    def _failure(self, what: str) -> Unavailable:
        return Unavailable(f"verifier {self.worker.worker_id} at {self.worker.address} {what}; try again")
