"""One generation while this router owns it: decode it, make its tokens durable, send them; then finish it, or release
it for another router to resume."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial

from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.session.contract import Plan, StepReport
from outrider.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    Moved,
    OutriderError,
    Overloaded,
    Superseded,
    Unavailable,
)
from outrider.rpc.tracing import client_span
from outrider.telemetry.tracing import recording_span
from router.api.requests import check_fits
from router.reporting.request_metrics import plan_attributes
from router.reporting.usage_stats import UsageStats
from router.scheduling.admission import GOING_DOWN, AdmissionSlot
from router.scheduling.drafter_assignment import DraftAssignment, DrafterSet
from router.sessions.outbox import NOT_READ, FinishedEvent, Outbox, StartedEvent
from router.sessions.response import EndReason
from router.sessions.session_open import OpenedGeneration, RouterContext, matching_verifiers, take_over
from router.sessions.standby import Standby
from router.sessions.token_log import TokenLog
from router.sessions.verifier_client import DecodeEnd, DecodeStart, DecodeStream, ReceivedCommit
from router.speculation.step_statuses import StepStatuses

DEADLINE_SLACK_S = 0.05  # gRPC may cancel a call this much before its deadline by our clock
MAX_FAILURES = 4  # verifiers in a row that fail without a token, before the client gets the error
RENEWALS_PER_LEASE = 3
VERIFIER_WAIT_S = 30.0  # how long a generation whose verifier drains waits for another verifier
VERIFIER_CHECK_S = 0.2  # between two checks for a verifier
CLIENT_CHECK_S = 0.25  # between two checks of a client; one that is behind at a check may lose its slot to others

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
        self._plan = opened.policy.plan()
        self._sample_collector = router.sample_writer.collector(self.tenant, opened.model, opened.turn.contract)
        self._stream: DecodeStream | None = None
        self._drafters: DrafterSet
        self._kv_holder = opened.record.verifier  # worker id of the verifier that has its KV
        self._standby = Standby(router, opened.model, self.tenant) if router.config.standby else None
        self._waiting: asyncio.Task[None] | None = None  # the wait between two verifier streams
        self._started = False
        self._halted: EndReason | OutriderError | None = None  # why `run` has to stop early
        self._following = False  # `run` is processing commits
        self._yielding = False  # its slot goes to other requests until its client has caught up
        self._handed_on = False  # its slot was already handed to a call that takes it over
        self._outbox = outbox
        self._client_check: asyncio.TimerHandle | None = None  # the next check of a client that is behind

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
            if self._client_check is not None:
                self._client_check.cancel()
            self._sample_collector.flush()
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
        return self._plan

    async def cancel(self) -> None:
        """End the generation and wait for its end: no new step starts for it, and `run` finishes."""
        self.stop()
        await self.ended.wait()

    def stop(self) -> None:
        """End the generation as `cancel` does, without waiting for its end."""
        self._halt(EndReason.CANCELLED)

    def move(self) -> None:
        """Stop the generation where it stands; another router resumes it."""
        self._halt(Moved(GOING_DOWN))

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
        if gone and self._past_deadline(DEADLINE_SLACK_S):
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
                wait_first = self._wait_for_verifier
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
        deadline, beat_s = self._opened.turn.deadline, self._router.config.lease_s / RENEWALS_PER_LEASE
        try:
            while not waiting.done():
                left_s = beat_s if deadline is None else max(0.0, deadline - time.time())
                await asyncio.wait({waiting}, timeout=min(left_s, beat_s))
                if self._past_deadline() and not waiting.done():
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

    async def _wait_for_verifier(self) -> None:
        """Wait until a verifier serves the model. Raises Unavailable if there is none for VERIFIER_WAIT_S."""
        give_up = time.monotonic() + VERIFIER_WAIT_S
        while True:
            try:
                await matching_verifiers(self._router, self._opened.model)
                return
            except Unavailable:
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(VERIFIER_CHECK_S)

    async def _decode_on_one_verifier(self, token_log: TokenLog) -> EndReason:
        """Decode the rest of the response on one verifier."""
        async with self._open_stream(token_log) as stream:
            self._kv_holder = stream.worker.worker_id
            self._drafters = self._assign_drafters(token_log, stream)
            try:
                self._send_started(stream.cached)
                self._following = True
                return await self._process_commits(token_log, stream)
            finally:
                self._following = False
                self._drafters.detach_all()

    @asynccontextmanager
    async def _open_stream(self, token_log: TokenLog) -> AsyncIterator[DecodeStream]:
        """Open a stream on the first verifier that has a KV slot: the one that has the session's KV, else the least
        loaded."""
        worker_pool, contract = self._router.worker_pool, self._opened.turn.contract
        workers = check_fits(
            token_log.tokens, contract, await matching_verifiers(self._router, self._opened.model), self._response.start
        )
        refusal: OutriderError | None = None
        for worker in worker_pool.rank_verifiers(workers, self._kv_holder, token_log.tokens, self.tenant):
            worker_pool.add_session(worker)
            began = time.monotonic()
            try:
                with client_span("outrider.v1.Verifier/Decode") as span:
                    self._stream = stream = DecodeStream(
                        worker, worker_pool.channel(worker), self._decode_start(token_log)
                    )
                    span.add_event("plan", plan_attributes(self._plan))
                    if self._halted is not None:
                        stream.cancel()
                    await stream.open()
                    yield stream
                    return
            except (Unavailable, Overloaded) as error:
                worker_pool.on_failure(worker, error)
                if stream.opened:
                    raise
                if not isinstance(refusal, Overloaded):  # a full verifier will have room later
                    refusal = error
            finally:
                if stream.over:
                    self._router.background.spawn(stream.finish())
                else:
                    stream.cancel()
                worker_pool.remove_session(worker, time.monotonic() - began if stream.opened else 0.0)
        assert refusal is not None
        raise refusal

    def _decode_start(self, token_log: TokenLog) -> DecodeStart:
        config, record, turn = self._router.config, self._opened.record, self._opened.turn
        return DecodeStart(
            session_id=self.session_id,
            tenant=record.tenant,
            epoch=token_log.epoch,
            model=record.model,
            tokenizer_digest=record.tokenizer_digest,
            tokens=tuple(token_log.tokens),
            digest=self._response.digest,
            answer_position=turn.answer_position,
            contract=self._sample_collector.verifier_contract(turn.contract),
            plan=self._plan,
            window=config.window,
            lease_s=config.lease_s,
            timeout_s=None if turn.deadline is None else max(0.0, turn.deadline - time.time()),
        )

    def _assign_drafters(self, token_log: TokenLog, stream: DecodeStream) -> DrafterSet:
        wanted = self._router.config.drafters_per_session if self._plan.depth and not stream.worker.treeless else 0
        contract = self._opened.turn.contract
        single = (
            rule_of(contract).child_sampling is ChildSampling.SAMPLED
        )  # draws of several drafters do not come from one q
        assignment = DraftAssignment(
            session_id=self.session_id,
            tenant=self._opened.record.tenant,
            epoch=token_log.epoch,
            upstream=stream.worker,
            tokenizer_digest=self._opened.model.digest,
            greedy=contract.greedy,
            single=single,
            previous=token_log.record.drafters,
        )
        router = self._router
        wanted = min(wanted, 1) if single else wanted
        return DrafterSet(router.worker_pool, router.background, assignment, wanted, router.tiers, router.ticket_key)

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
            )
        )
        self._outbox.replay(opened.missing, self._response.position, self._response.text_offset)
        self._schedule_client_check()

    async def _process_commits(self, token_log: TokenLog, stream: DecodeStream) -> EndReason:
        """Handle each commit: log it, acknowledge it, send it, and give its report to the policy."""
        response, policy, metrics = self._response, self._opened.policy, self._router.metrics
        statuses = StepStatuses(self._router.config, policy, stream.worker)
        while not isinstance(event := await stream.next(), DecodeEnd):
            if not isinstance(event, ReceivedCommit):
                if token_log.idle_s > self._router.config.lease_s / RENEWALS_PER_LEASE:
                    await token_log.renew()
                if self._past_deadline():
                    return EndReason.DEADLINE
                continue
            part = response.add_commit(self._sample_collector.for_client(event))
            self._held_slot.spend(output=len(part.tokens))
            append_began = time.monotonic()
            await token_log.append(
                part.tokens,
                response.digest,
                logprobs=part.logprobs,
                plan=self._plan,
                verifier=stream.worker.worker_id,
                drafters=self._drafters.drafter_ids,
            )
            self._sample_collector.add(token_log.tokens, len(part.tokens), event)
            metrics.append.record(time.monotonic() - append_began)
            metrics.tokens[self.model] += len(part.tokens)
            metrics.observe_step(self._drafters.drafter_ids, event.report, event.credits)
            self._outbox.put(part)
            self._acknowledge()
            self._schedule_client_check()
            if self._standby is not None:
                self._standby.follow(token_log.tokens, stream.worker)
            self._record_status(event.report, statuses)
            if response.stopped:
                return EndReason.STOP
            self._drafters.observe(len(event.tokens), event.report.drafters, event.credits)
            policy.observe(event.report)
            plan = policy.plan()
            if plan is not self._plan:
                self._change_plan(plan, token_log, stream)
        if response.reason is None:
            raise InternalError(f"verifier {stream.worker.worker_id} ended the response before its contract did")
        return response.reason

    def _record_status(self, report: StepReport, statuses: StepStatuses) -> None:
        """Record whether the step verified drafts, and if not, why."""
        status = statuses.of(report, self._plan, self._drafters.obstacle)
        self.usage.speculation.observe(status)
        self._router.metrics.speculation[self.model, status.reason.value] += 1

    def _change_plan(self, plan: Plan, token_log: TokenLog, stream: DecodeStream) -> None:
        """Follow another plan. Drafters that the plan does not need are detached and serve other sessions."""
        was_drafting, self._plan = self._plan.depth > 0, plan
        self._router.metrics.changes += 1
        if (span := recording_span()) is not None:
            span.add_event("plan", plan_attributes(plan))
        stream.plan(plan)
        if was_drafting != (plan.depth > 0):
            self._drafters.detach_all()
            self._drafters = self._assign_drafters(token_log, stream)

    def _acknowledge(self) -> None:
        """Let the verifier continue as far as the log and the client allow."""
        if self._stream is not None:
            self._stream.acknowledge(self._outbox.limit)

    def _schedule_client_check(self) -> None:
        """Check the client in a moment, and again until it has been sent everything."""
        if self._client_check is None:
            self._client_check = asyncio.get_running_loop().call_later(CLIENT_CHECK_S, self._check_client)

    def _check_client(self) -> None:
        """Yield the slot if the client is behind and other requests wait; give the generation up if the client does not
        read at all."""
        self._client_check = None
        if self._outbox.empty:
            return
        if self._outbox.stalled:
            self._halt(Unavailable(NOT_READ))
            return
        behind = self._outbox.behind and self._outbox.unread_s >= CLIENT_CHECK_S
        if behind and self._following and self._router.admission.has_waiter_for(self._held_slot.ticket):
            self._yielding = True
            self._interrupt()
        self._schedule_client_check()

    @property
    def _held_slot(self) -> AdmissionSlot:
        """The slot, which every generation has that has not ended."""
        assert self._slot is not None
        return self._slot

    def _past_deadline(self, slack_s: float = 0.0) -> bool:
        deadline = self._opened.turn.deadline
        return deadline is not None and time.time() >= deadline - slack_s
