"""One generation while this router owns it: decode it, make its tokens durable, send them; then finish it, or release
it for another router to resume."""

from __future__ import annotations

import asyncio
from typing import Any

from outrider.core.session.contract import FinishReason, Plan
from outrider.errors import Cancelled, Moved, Overloaded, Superseded, Unavailable
from outrider.store.registry import Worker
from router.counters.usage_stats import UsageStats
from router.scheduling.admission import SHUTTING_DOWN, AdmissionSlot
from router.sessions.context import RouterContext
from router.sessions.decode_attempts import DecodeAttempts
from router.sessions.outbox import FinishedEvent, Outbox, StartedEvent
from router.sessions.takeover import ClientPosition, OpenedGeneration, Takeovers
from router.sessions.token_log import TokenLog

DEADLINE_SLACK_S = 0.05  # gRPC may cancel a call this much before its deadline by our clock


class OwnedGeneration:
    """One generation under this router's epoch.

    Call `run` once. `cancel`, `move` and `supersede` may be called at any time. `ended` is set when `run` has returned
    or raised.

    Nothing here waits for the client: its events go into an outbox.
    """

    def __init__(
        self,
        router: RouterContext,
        takeovers: Takeovers,
        opened: OpenedGeneration,
        slot: AdmissionSlot | None,
        outbox: Outbox,
    ) -> None:
        """`slot`: None for a generation that has ended and is only read."""
        self.session_id = opened.record.session_id
        self.tenant = opened.record.tenant
        self.model = opened.model.name
        self.reason = ""  # why the generation ended
        self.ended = asyncio.Event()
        self._store = router.store
        self._background = router.decoding.background
        self._takeovers = takeovers
        self._opened = opened
        self._slot = slot
        self._response = opened.response
        self._started = False
        self.discarded = False  # whether the session keeps no token of the response
        self._discards = False  # what `cancel` has asked for
        self._handed_on = False  # its slot was already handed to a call that takes it over
        self._outbox = outbox
        self._attempts = DecodeAttempts(
            router.decoding,
            opened,
            slot,
            outbox,
            on_started=self._on_started,
            others_wait=router.admission.has_waiter_for,
        )

    async def run(self) -> None:
        """Put StartedEvent, the parts of the response, and FinishedEvent into the outbox; raise what went wrong. No
        task of the generation is left when this returns.

        A part goes into the outbox once its tokens are durable. A generation is left to be resumed if its client has
        gone or does not read, or if no verifier is found. Raises Moved after `move`, once the generation is released.
        """
        outbox = self._outbox
        outbox.on_progress, outbox.on_error = self._attempts.acknowledge, self._attempts.halt
        try:
            reason = self._opened.ended
            if reason is None:
                reason = await self._decode_and_finish()
            else:
                self._send_started(cached=0)
            last_part = self._response.flush()
            if last_part.text and not self._response.scoring:
                outbox.put(last_part)
            self.reason = reason.value
            outbox.put(FinishedEvent(reason, self._response.start, self._response.usage, self._response.stop))
        finally:
            self._attempts.client_watch.stop()
            self._attempts.pump.close()
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
        return self._attempts.kv_holder

    @property
    def drafters(self) -> tuple[str, ...]:
        """Worker ids of the drafters at the latest append to its log."""
        token_log = self._opened.token_log
        return () if token_log is None else token_log.record.drafters

    @property
    def plan(self) -> Plan:
        """The current speculation plan."""
        return self._attempts.pump.plan

    def estimates(self) -> dict[str, Any]:
        """Return what is estimated of this generation, and of the drafters of its tree."""
        return self._attempts.pump.estimates()

    async def cancel(self, *, discard: bool = False) -> None:
        """End the generation and wait for its end: no new step starts for it, and `run` finishes. `discard`: the
        session keeps no token of the response, unless that has ended before."""
        self._discards |= discard
        self.stop()
        await self.ended.wait()

    def stop(self) -> None:
        """End the generation as `cancel` does, without waiting for its end."""
        self._attempts.halt(FinishReason.CANCELLED)

    def move(self) -> None:
        """Stop the generation where it stands; another router resumes it."""
        self._attempts.halt(Moved(SHUTTING_DOWN))

    def supersede(self, epoch: int) -> None:
        """End the generation because another call of this router owns its session since `epoch`."""
        self._attempts.halt(Superseded(f"session {self.session_id} was taken over under epoch {epoch}; do not retry"))

    async def _decode_and_finish(self) -> FinishReason:
        """Decode under our epoch. Finish or release the generation at the end, whatever happens."""
        token_log = self._opened.token_log
        assert token_log is not None  # the generation has not ended
        try:
            reason = await self._attempts.run(token_log)
            self.discarded = self._discards and reason is FinishReason.CANCELLED
            await token_log.finish(reason.value, self._response.usage.dump(), discard=self.discarded)
        except Superseded:
            record = await self._store.sessions.get(self.session_id)
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

    async def _ended_elsewhere(self) -> FinishReason:
        """Return why a Cancel at another router ended the generation. The log decides: this router may have taken more
        tokens than became durable."""
        self._send_started(cached=0)
        generation, sent_end = self._opened.record.generation, self._outbox.end
        sent_end = max(sent_end[0], self._response.start), sent_end[1]  # it may have ended before the prompt was sent
        ended = await self._takeovers.take_over(self.tenant, self.session_id, generation, ClientPosition(*sent_end))
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
            self._background.spawn(token_log.finish(FinishReason.DEADLINE.value, usage))
        elif gone or isinstance(error, Unavailable | Overloaded):
            self._background.spawn(token_log.release(usage))
        else:
            self._background.spawn(token_log.finish(FinishReason.FAILED.value, usage))

    def _on_started(self, verifier: Worker, cached: int) -> None:
        """Publish where the session decodes, and send StartedEvent."""
        self._background.spawn(self._store.events.publish(self.session_id, verifier.worker_id))
        self._send_started(cached)

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
        response = self._response
        if response.scored == 0:
            assert opened.token_log is not None  # an answer that has ended is sent only behind its prompt
            self._outbox.put(response.first_token(opened.token_log.tokens))
        if not response.scoring:
            self._outbox.replay(opened.missing, response.position, response.text_offset)
        self._attempts.client_watch.start()
