"""Decodes a generation on one verifier after the other: what ends an attempt, and what the next one waits for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial

from outrider.core.session.contract import FinishReason
from outrider.errors import DeadlineExceeded, Moved, OutriderError, Overloaded, Unavailable
from outrider.limits.fair_queue import AdmissionTicket
from outrider.rpc.backoff import pause_s
from outrider.store.registry import Worker
from router.scheduling.admission import AdmissionSlot
from router.sessions.commit_pump import RENEWALS_PER_LEASE, CommitPump
from router.sessions.context import DecodeResources
from router.sessions.outbox import NOT_READ, ClientWatch, Outbox
from router.sessions.standby import Standby
from router.sessions.takeover import OpenedGeneration
from router.sessions.token_log import TokenLog
from router.sessions.verifier_client import DecodeStream
from router.sessions.verifier_stream import open_stream

MAX_FAILURES = 4  # verifiers in a row that fail without a token, before the client gets the error
FIRST_RETRY_S, LONGEST_RETRY_S = 0.1, 5.0  # pauses between attempts at verifiers that are listed and refuse

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outage:
    """The time in which a generation that has begun reaches no verifier."""

    give_up: float  # monotonic time
    attempts: int = 0  # at verifiers that were listed


class DecodeAttempts:
    """The attempts of one generation. Call `run` once, and `halt` at any time.

    While the client is more than a window behind, the verifier is acknowledged no further tokens, so it pauses. If
    other requests wait meanwhile, they get the generation's slot.
    """

    def __init__(
        self,
        resources: DecodeResources,
        opened: OpenedGeneration,
        slot: AdmissionSlot | None,
        outbox: Outbox,
        *,
        on_started: Callable[[Worker, int], None],
        others_wait: Callable[[AdmissionTicket], bool],
    ) -> None:
        """`slot`: None for a generation that has ended; `on_started`: called with a verifier that has begun, and the
        number of tokens cached there; `others_wait`: returns whether a queued request could use the slot."""
        self.kv_holder = opened.record.verifier  # worker id of the verifier that has its KV
        self.client_watch = ClientWatch(
            outbox, on_unread=lambda: self.halt(Unavailable(NOT_READ)), on_behind=self._yield_if_others_wait
        )
        self._resources = resources
        self._others_wait = others_wait
        self._opened = opened
        self._slot = slot
        self._outbox = outbox
        self._on_started = on_started
        self._stream: DecodeStream | None = None  # of the latest attempt
        self._stalled: list[str] = []  # worker ids of the verifiers that stood still
        self._standby = None
        if resources.config.standby:
            self._standby = Standby(resources, opened.model, opened.record.tenant, opened.turn.contract.adapter)
        self._waiting: asyncio.Task[None] | None = None  # the wait between two verifier streams
        self._begun = False  # a verifier has begun the response: it is worth waiting for another one
        self._outage: _Outage | None = None  # since no verifier can be reached
        self._halted: FinishReason | OutriderError | None = None  # why `run` has to stop early
        self._following = False  # `run` is processing commits
        self._yielding = False  # its slot goes to other requests until its client has caught up
        self.pump = CommitPump(resources, opened, slot, outbox, self.client_watch, self._standby)

    async def run(self, token_log: TokenLog) -> FinishReason:
        """Decode the response, on one verifier after the other if need be."""
        failures = 0
        self._begun = token_log.origin is not None
        wait_first: Callable[[], Coroutine[None, None, None]] | None = None
        while self._opened.response.reason is None:  # a verifier may have failed between its last commit and the end
            before = self._opened.response.position
            try:
                if wait_first is not None:
                    await self._wait_for(wait_first(), token_log)
                wait_first = None
                return await self._decode_on_one_verifier(token_log)
            except DeadlineExceeded:
                return FinishReason.DEADLINE
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task and task.cancelling():
                    raise
                match self._halted:  # `_interrupt` cancelled what `run` waits for, not `run` itself
                    case OutriderError() as error:
                        raise error from None
                    case None if self._yielding:
                        wait_first = partial(self._yield_slot, token_log)
                    case None:
                        raise
                    case reason:
                        return reason
            except Overloaded as error:
                if wait_first is not None:
                    raise
                wait_first = partial(self._held_slot.retake, str(error))
            except Unavailable as error:
                moved = isinstance(error, Moved)
                self._begun |= moved
                if wait_first is not None or not self._begun:
                    raise
                opened = self._stream is not None and self._stream.opened
                if not moved and self._stream is not None and (opened or self._stream.lost):
                    failures = 1 if self._opened.response.position > before else failures + 1
                    if failures >= MAX_FAILURES:
                        raise
                if opened:
                    await self._lose_verifier(token_log, error, logging.INFO if moved else logging.WARNING)
                else:
                    wait_first = partial(self._wait_for_verifier, error)
        return self._opened.response.reason

    def halt(self, why: FinishReason | OutriderError) -> None:
        """Make `run` stop early. Of several reasons the first one counts."""
        if self._halted is None:
            self._halted = why
            self._interrupt()

    def acknowledge(self) -> None:
        """Let the verifier continue as far as the log and the client allow."""
        if self._stream is not None:
            self._stream.acknowledge(self._outbox.limit)

    def _interrupt(self) -> None:
        for running in (self._stream, self._waiting):
            if running is not None:
                running.cancel()

    async def _lose_verifier(self, token_log: TokenLog, error: OutriderError, level: int) -> None:
        """Prepare for another verifier, if possible the standby that has the KV; raise the epoch to fence the lost
        verifier."""
        self._resources.metrics.moves += 1
        log.log(level, "session %s moves to another verifier: %s", self._opened.record.session_id, error)
        if self._standby is not None:
            self.kv_holder = self._standby.holder
        await token_log.reacquire()

    async def _wait_for(self, work: Coroutine[None, None, None], token_log: TokenLog) -> None:
        """Wait for `work` and keep the lease. Raises DeadlineExceeded at the deadline, and CancelledError once the
        generation is halted."""
        self._waiting = waiting = asyncio.create_task(work)
        if self._halted is not None:
            waiting.cancel()
        beat_s = self._resources.config.lease_s / RENEWALS_PER_LEASE
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=min(max(0.0, self._opened.left_s), beat_s))
                if self._opened.left_s <= 0.0 and not waiting.done():
                    raise DeadlineExceeded("the deadline passed while the generation waited")
                if token_log.idle_s > beat_s:
                    await token_log.renew()
            waiting.result()
        finally:
            waiting.cancel()

    async def _yield_slot(self, token_log: TokenLog) -> None:
        """Give the slot to waiting requests, and queue for another slot once the client has caught up. Raises as
        `AdmissionSlot.rejoin_queue`."""
        self._held_slot.release()
        await self._outbox.caught_up()
        self._yielding = False
        await self._held_slot.rejoin_queue()
        await token_log.reacquire()  # fences the verifier that it left, which may not have noticed

    async def _wait_for_verifier(self, error: Unavailable) -> None:
        """Wait, without a slot, until a verifier is worth an attempt: one has come, or a listed one had a pause.

        Raises `error`, for which no verifier could be reached, once the outage has lasted `failover_wait_s`; and as
        `AdmissionSlot.retake`.
        """
        pool, model = self._resources.worker_pool, self._opened.model.name
        if self._outage is None:
            self._outage = _Outage(time.monotonic() + self._resources.config.failover_wait_s)
            log.info("session %s waits for a verifier: %s", self._opened.record.session_id, error)
        self._held_slot.release()
        longest_s = pause_s(self._outage.attempts, FIRST_RETRY_S, LONGEST_RETRY_S)
        self._outage.attempts += 1
        while (left_s := self._outage.give_up - time.monotonic()) > 0.0:
            await pool.listing_change(min(left_s, longest_s) if pool.serves(model) else left_s)
            if pool.serves(model):
                return await self._held_slot.retake(str(error))
        raise error

    async def _decode_on_one_verifier(self, token_log: TokenLog) -> FinishReason:
        """Decode the rest of the response on one verifier."""
        self._stream = None
        attempt = open_stream(
            self._resources,
            self._opened,
            token_log,
            contract=self.pump.contract,
            plan=self.pump.plan,
            kv_holder=self.kv_holder,
            on_attempt=self._on_attempt,
            stalled=self._stalled,
        )
        async with attempt as stream:
            self.kv_holder = stream.worker.worker_id
            self._begun, self._outage = True, None
            self._on_started(stream.worker, stream.cached)
            self._following = True
            try:
                return await self.pump.run(token_log, stream)
            finally:
                self._following = False

    def _on_attempt(self, stream: DecodeStream) -> None:
        """Keep a stream that is about to be opened, so that it can be interrupted."""
        self._stream = stream
        if self._halted is not None:
            stream.cancel()

    def _yield_if_others_wait(self) -> None:
        """Yield the slot of a client that is behind, if other requests wait for one."""
        if self._following and self._others_wait(self._held_slot.ticket):
            self._yielding = True
            self._interrupt()

    @property
    def _held_slot(self) -> AdmissionSlot:
        """The slot, which every generation has that has not ended."""
        assert self._slot is not None
        return self._slot
