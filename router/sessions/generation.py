"""One generation while this router owns it: decode it, make its tokens durable, send them; then finish it, or release
it for another router to resume."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from outrider.core.session.contract import Plan
from outrider.errors import Cancelled, DeadlineExceeded, Moved, OutriderError, Overloaded, Superseded, Unavailable
from router.counters.usage_stats import UsageStats
from router.scheduling.admission import SHUTTING_DOWN, AdmissionSlot
from router.sessions.client_watch import ClientWatch
from router.sessions.commit_pump import RENEWALS_PER_LEASE, CommitPump
from router.sessions.outbox import NOT_READ, FinishedEvent, Outbox, StartedEvent
from router.sessions.response import EndReason
from router.sessions.session_open import OpenedGeneration, RouterContext, matching_verifiers, take_over
from router.sessions.standby import Standby
from router.sessions.token_log import TokenLog
from router.sessions.verifier_client import DecodeStream
from router.sessions.verifier_stream import open_stream

DEADLINE_SLACK_S = 0.05  # gRPC may cancel a call this much before its deadline by our clock
MAX_FAILURES = 4  # verifiers in a row that fail without a token, before the client gets the error
VERIFIER_WAIT_S = 30.0  # how long a generation whose verifier drains waits for another verifier
VERIFIER_CHECK_S = 0.2  # between two checks for a verifier

log = logging.getLogger(__name__)


class OwnedGeneration:
    """One generation under this router's epoch.

    Call `run` once. `cancel`, `move` and `supersede` may be called at any time. `ended` is set when `run` has returned
    or raised.

    Nothing here waits for the client: its events go into an outbox. While the client is more than a window behind, the
    router acknowledges no further tokens, so the verifier pauses. If other requests wait meanwhile, they get this
    generation's slot.
    """

    def __init__(
        self, router: RouterContext, opened: OpenedGeneration, slot: AdmissionSlot | None, outbox: Outbox
    ) -> None:
        """`slot`: None for a generation that has ended and is only read."""
        self.session_id = opened.record.session_id
        self.tenant = opened.record.tenant
        self.model = opened.model.name
        self.reason = ""  # why the generation ended
        self.ended = asyncio.Event()
        self._router = router
        self._opened = opened
        self._slot = slot
        self._response = opened.response
        self._stream: DecodeStream | None = None
        self._stalled: list[str] = []  # worker ids of the verifiers that stood still
        self._kv_holder = opened.record.verifier  # worker id of the verifier that has its KV
        self._standby = (
            Standby(router, opened.model, self.tenant, opened.turn.contract.adapter) if router.config.standby else None
        )
        self._waiting: asyncio.Task[None] | None = None  # the wait between two verifier streams
        self._started = False
        self._halted: EndReason | OutriderError | None = None  # why `run` has to stop early
        self._following = False  # `run` is processing commits
        self._yielding = False  # its slot goes to other requests until its client has caught up
        self._handed_on = False  # its slot was already handed to a call that takes it over
        self._outbox = outbox
        self._client_watch = ClientWatch(
            outbox, on_unread=lambda: self._halt(Unavailable(NOT_READ)), on_behind=self._yield_if_others_wait
        )
        self._pump = CommitPump(router, opened, slot, outbox, self._client_watch, self._standby)

    async def run(self) -> None:
        """Put StartedEvent, the parts of the response, and FinishedEvent into the outbox; raise what went wrong. No
        task of the generation is left when this returns.

        A part goes into the outbox once its tokens are durable. A generation is left to be resumed if its client has
        gone or does not read, or if no verifier is found. Raises Moved after `move`, once the generation is released.
        """
        outbox = self._outbox
        outbox.on_progress, outbox.on_error = self._acknowledge, self._halt
        try:
            reason = self._opened.ended
            if reason is None:
                reason = await self._decode_and_finish()
            else:
                self._send_started(cached=0)
            last_part = self._response.flush()
            if last_part.text:
                outbox.put(last_part)
            self.reason = reason.value
            outbox.put(FinishedEvent(reason, self._response.start, self._response.usage))
        finally:
            self._client_watch.stop()
            self._pump.close()
            self.ended.set()

    @property
    def epoch(self) -> int:
        """The epoch under which this router owns the session; 0: the generation has ended."""
        return 0 if self._opened.token_log is None else self._opened.token_log.epoch

    def hand_on_slot(self) -> bool:
        """Return whether a call that takes the generation over may use its slot. True at most once."""
        handed_on, self._handed_on = self._handed_on, True
        return not handed_on and self._slot is not None and self._slot.held

    @property
    def usage(self) -> UsageStats:
        """What the generation has used so far."""
        return self._response.usage

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens: the position of the response's first token."""
        return self._response.start

    @property
    def verifier(self) -> str:
        """Worker id of the verifier that has its KV."""
        return self._kv_holder

    @property
    def drafters(self) -> tuple[str, ...]:
        """Worker ids of the drafters at the latest append to its log."""
        token_log = self._opened.token_log
        return () if token_log is None else token_log.record.drafters

    @property
    def plan(self) -> Plan:
        """The current speculation plan."""
        return self._pump.plan

    def estimates(self) -> dict[str, Any]:
        """Return what is estimated of this generation, and of the drafters of its tree."""
        return self._pump.estimates()

    async def cancel(self) -> None:
        """End the generation and wait for its end: no new step starts for it, and `run` finishes."""
        self.stop()
        await self.ended.wait()

    def stop(self) -> None:
        """End the generation as `cancel` does, without waiting for its end."""
        self._halt(EndReason.CANCELLED)

    def move(self) -> None:
        """Stop the generation where it stands; another router resumes it."""
        self._halt(Moved(SHUTTING_DOWN))

    def supersede(self, epoch: int) -> None:
        """End the generation because another call of this router owns its session since `epoch`."""
        self._halt(Superseded(f"session {self.session_id} was taken over under epoch {epoch}; do not retry"))

    def _halt(self, why: EndReason | OutriderError) -> None:
        """Make `run` stop early. Of several reasons the first one counts."""
        if self._halted is None:
            self._halted = why
            self._interrupt()

    def _interrupt(self) -> None:
        for running in (self._stream, self._waiting):
            if running is not None:
                running.cancel()

    async def _decode_and_finish(self) -> EndReason:
        """Decode under our epoch. Finish or release the generation at the end, whatever happens."""
        token_log = self._opened.token_log
        assert token_log is not None  # the generation has not ended
        try:
            reason = await self._decode(token_log)
            await token_log.finish(reason.value, self._response.usage.dump())
        except Superseded:
            record = await self._router.sessions.get(self.session_id)
            if not record.finished or record.generation != self._opened.record.generation:
                raise
            return await self._ended_elsewhere()
        except Moved:
            await token_log.release(self._response.usage.dump())  # before the client resumes it at another router
            raise
        except BaseException as error:
            self._settle_after_error(token_log, error)
            raise
        self._send_started(cached=0)
        return reason

    async def _ended_elsewhere(self) -> EndReason:
        """Return why a Cancel at another router ended the generation. The log decides: this router may have taken more
        tokens than became durable."""
        self._send_started(cached=0)
        generation, sent_end = self._opened.record.generation, self._outbox.end
        ended = await take_over(self._router, self.tenant, self.session_id, generation, *sent_end)
        self._response = ended.response
        self._outbox.replay(ended.missing, self._response.position, self._response.text_offset)
        if ended.token_log is not None:
            self._settle_after_error(
                ended.token_log, error := Unavailable("Redis lost how the generation ended; resume it")
            )
            raise error
        assert ended.ended is not None
        return ended.ended

    def _settle_after_error(self, token_log: TokenLog, error: BaseException) -> None:
        """Finish or release, in the background, the generation that `error` broke off."""
        usage = self._response.usage.dump()
        gone = isinstance(error, asyncio.CancelledError | Cancelled)
        if gone and self._opened.left_s <= DEADLINE_SLACK_S:
            self._router.background.spawn(token_log.finish(EndReason.DEADLINE.value, usage))
        elif gone or isinstance(error, Unavailable | Overloaded):
            self._router.background.spawn(token_log.release(usage))
        else:
            self._router.background.spawn(token_log.finish(EndReason.FAILED.value, usage))

    async def _decode(self, token_log: TokenLog) -> EndReason:
        """Decode the response, on one verifier after the other if need be."""
        failures = 0
        wait_first: Callable[[], Coroutine[None, None, None]] | None = None
        while self._response.reason is None:  # a verifier may have failed between its last commit and the end
            before = self._response.position
            try:
                if wait_first is not None:
                    await self._wait_for(wait_first(), token_log)
                wait_first = None
                return await self._decode_on_one_verifier(token_log)
            except DeadlineExceeded:
                return EndReason.DEADLINE
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
            except Moved as error:
                await self._lose_verifier(token_log, error, logging.INFO)
                wait_first = partial(self._wait_for_verifier, token_log)
            except Unavailable as error:
                failures = 1 if self._response.position > before else failures + 1
                if wait_first is not None or not self._started or failures >= MAX_FAILURES:
                    raise
                await self._lose_verifier(token_log, error, logging.WARNING)
        return self._response.reason

    async def _lose_verifier(self, token_log: TokenLog, error: OutriderError, level: int) -> None:
        """Prepare for another verifier, if possible the standby that has the KV; raise the epoch to fence the lost
        verifier."""
        self._router.metrics.moves += 1
        log.log(level, "session %s moves to another verifier: %s", self.session_id, error)
        if self._standby is not None:
            self._kv_holder = self._standby.holder
        await token_log.reacquire()

    async def _wait_for(self, work: Coroutine[None, None, None], token_log: TokenLog) -> None:
        """Wait for `work` and keep the lease. Raises DeadlineExceeded at the deadline, and CancelledError once the
        generation is halted."""
        self._waiting = waiting = asyncio.create_task(work)
        if self._halted is not None:
            waiting.cancel()
        beat_s = self._router.config.lease_s / RENEWALS_PER_LEASE
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

    async def _wait_for_verifier(self, token_log: TokenLog) -> None:
        """Wait until a verifier can go on with the text. Raises Unavailable if there is none for VERIFIER_WAIT_S."""
        give_up = time.monotonic() + VERIFIER_WAIT_S
        while True:
            try:
                await matching_verifiers(self._router, self._opened.model, token_log.origin)
                return
            except Unavailable:
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(VERIFIER_CHECK_S)

    async def _decode_on_one_verifier(self, token_log: TokenLog) -> EndReason:
        """Decode the rest of the response on one verifier."""
        attempt = open_stream(
            self._router,
            self._opened,
            token_log,
            self._pump.contract,
            self._pump.plan,
            self._kv_holder,
            self._on_attempt,
            self._stalled,
        )
        async with attempt as stream:
            self._kv_holder = stream.worker.worker_id
            self._router.background.spawn(self._router.session_events.publish(self.session_id, self._kv_holder))
            self._send_started(stream.cached)
            self._following = True
            try:
                return await self._pump.run(token_log, stream)
            finally:
                self._following = False

    def _on_attempt(self, stream: DecodeStream) -> None:
        """Keep a stream that is about to be opened, so that it can be interrupted."""
        self._stream = stream
        if self._halted is not None:
            stream.cancel()

    def _send_started(self, cached: int) -> None:
        """Send StartedEvent, once, and the durable parts that the client lacks."""
        if self._started:
            return
        self._started = True
        opened = self._opened
        self._outbox.put(
            StartedEvent(
                session_id=self.session_id,
                generation=opened.record.generation,
                model=opened.model.name,
                seed=opened.turn.contract.seed,
                prompt_tokens=self._response.start,
                cached_tokens=min(cached, self._response.start),
                forked_from=opened.forked_from,
                form=self._response.form,
            )
        )
        self._outbox.replay(opened.missing, self._response.position, self._response.text_offset)
        self._client_watch.start()

    def _acknowledge(self) -> None:
        """Let the verifier continue as far as the log and the client allow."""
        if self._stream is not None:
            self._stream.acknowledge(self._outbox.limit)

    def _yield_if_others_wait(self) -> None:
        """Yield the slot of a client that is behind, if other requests wait for one."""
        if self._following and self._router.admission.has_waiter_for(self._held_slot.ticket):
            self._yielding = True
            self._interrupt()

    @property
    def _held_slot(self) -> AdmissionSlot:
        """The slot, which every generation has that has not ended."""
        assert self._slot is not None
        return self._slot
