"""One generation while it is this router's: decoded, made durable, sent; then ended, or left for another to resume."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial

from outrider.core.contract import Plan, StepReport
from outrider.core.rules import Drawn, rule_of
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
from outrider.rpc.spans import calling
from outrider.telemetry.tracing import recording
from router.admission import GOING_DOWN, Place
from router.answer import Reason
from router.decoding import Commit, DecodeStream, End, Start
from router.drafting import Drafters, Post
from router.ledger import Ledger
from router.opening import Cluster, Opened, suitable, take_over
from router.outbox import NOT_READ, Finished, Outbox, Started
from router.requests import check_fits
from router.speculation import StepStatuses
from router.standby import Standby
from router.telling import plan_attributes
from router.usage import Figures

DEADLINE_SLACK_S = 0.05  # gRPC may cancel a call this much before its deadline by our clock
ATTEMPTS = 4  # verifiers in a row that fail without a token, before the client hears of it
BEATS = 3  # renewals in a lease
MOVE_S = 30.0  # that a generation whose verifier went down in order waits for another one
LOOK_S = 0.2  # between two looks for one
GLANCE_S = 0.25  # between two looks at a client that is behind; after one a generation makes room for others

log = logging.getLogger(__name__)


class Generation:
    """`run` it once; `cancel`, `move` and `supersede` may come at any time. `ended` is set when `run` has returned or
    raised.

    Nothing here waits for the client: what it is sent is put into an outbox. While it is more than a window behind, the
    verifier is not acknowledged any further, so that it pauses; where others wait, they get the place meanwhile.
    """

    def __init__(self, cluster: Cluster, opened: Opened, place: Place | None, outbox: Outbox) -> None:
        """`place`: None for a generation that has ended, and is only read."""
        self.session_id = opened.record.session_id
        self.tenant = opened.record.tenant
        self.model = opened.model.name
        self.reason = ""  # why it ended
        self.ended = asyncio.Event()
        self._cluster = cluster
        self._opened = opened
        self._place = place
        self._answer = opened.answer
        self._plan = opened.policy.plan()
        self._lecture = cluster.teaching.lecture(self.tenant, opened.model, opened.turn.contract)
        self._stream: DecodeStream | None = None
        self._drafters: Drafters
        self._holder = opened.record.verifier  # worker id of who has its KV
        self._standby = Standby(cluster, opened.model, self.tenant) if cluster.config.standby else None
        self._pause: asyncio.Task[None] | None = None  # what it waits for between two streams
        self._started = False
        self._halted: Reason | OutriderError | None = None  # why it is to end before its time
        self._follows = False  # it takes commits
        self._yields = False  # its place is for others, until its client reads on
        self._handed_on = False  # its place has counted for who takes it over
        self._outbox = outbox
        self._glance: asyncio.TimerHandle | None = None  # the next look at a client that is behind

    async def run(self) -> None:
        """Puts Started, the answer's parts, and Finished into the outbox; raises what went wrong. Leaves nothing
        running.

        A part is put there once its tokens are durable. A generation whose client has gone or does not read, or that
        finds no verifier, is left to be resumed. Raises Moved, once that is done, after `move`.
        """
        outbox = self._outbox
        outbox.on_progress, outbox.on_broken = self._acknowledge, self._halt
        try:
            reason = self._opened.ended
            if reason is None:
                reason = await self._own()
            else:
                self._start(cached=0)
            rest = self._answer.rest()
            if rest.text:
                outbox.put(rest)
            self.reason = reason.value
            outbox.put(Finished(reason, self._answer.start, self._answer.figures))
        finally:
            if self._glance is not None:
                self._glance.cancel()
            self._lecture.end()
            self.ended.set()

    @property
    def epoch(self) -> int:
        """Of its session, as its owner has it; 0: it has ended."""
        return 0 if self._opened.ledger is None else self._opened.ledger.epoch

    def hands_on(self) -> bool:
        """Whether its place may count for a call that takes it over. That is so once."""
        handed_on, self._handed_on = self._handed_on, True
        return not handed_on and self._place is not None and self._place.held

    @property
    def figures(self) -> Figures:
        """What it cost so far."""
        return self._answer.figures

    @property
    def prompt_tokens(self) -> int:
        """Where its answer begins."""
        return self._answer.start

    @property
    def verifier(self) -> str:
        """Worker id of the verifier that has its KV."""
        return self._holder

    @property
    def drafters(self) -> tuple[str, ...]:
        """Worker ids of those that drafted for it when it last had news."""
        ledger = self._opened.ledger
        return () if ledger is None else ledger.record.drafters

    @property
    def plan(self) -> Plan:
        """The one in force."""
        return self._plan

    async def cancel(self) -> None:
        """Ends the generation: no new step is started for it, and `run` finishes. Returns when it has."""
        self.stop()
        await self.ended.wait()

    def stop(self) -> None:
        """The same, without waiting for the end."""
        self._halt(Reason.CANCELLED)

    def move(self) -> None:
        """Has it stop where it stands, and go on at another router."""
        self._halt(Moved(GOING_DOWN))

    def supersede(self, epoch: int) -> None:
        """Has it end because another call of this router owns its session since that epoch."""
        self._halt(Superseded(f"session {self.session_id} was taken over under epoch {epoch}; do not retry"))

    def _halt(self, why: Reason | OutriderError) -> None:
        """Ends it before its time. Of several reasons the first one counts."""
        if self._halted is None:
            self._halted = why
            self._interrupt()

    def _interrupt(self) -> None:
        for running in (self._stream, self._pause):
            if running is not None:
                running.cancel()

    async def _own(self) -> Reason:
        """Decodes under our epoch; ends the generation or leaves it to others, whatever happens."""
        ledger = self._opened.ledger
        assert ledger is not None  # it has not ended
        try:
            reason = await self._decode(ledger)
            await ledger.finish(reason.value, self._answer.figures.dump())
        except Superseded:
            record = await self._cluster.sessions.get(self.session_id)
            if not record.finished or record.generation != self._opened.record.generation:
                raise
            return await self._ended_elsewhere()
        except Moved:
            await ledger.release(self._answer.figures.dump())  # before the client goes on with it elsewhere
            raise
        except BaseException as error:
            self._leave(ledger, error)
            raise
        self._start(cached=0)
        return reason

    async def _ended_elsewhere(self) -> Reason:
        """A Cancel on another router ended it. What counts is the log: we may have taken more than became durable."""
        self._start(cached=0)
        generation, place = self._opened.record.generation, self._outbox.end
        ended = await take_over(self._cluster, self.tenant, self.session_id, generation, *place)
        self._answer = ended.answer
        self._outbox.replay(ended.missing, self._answer.position, self._answer.text_offset)
        if ended.ledger is not None:
            self._leave(ended.ledger, error := Unavailable("Redis lost how the generation ended; resume it"))
            raise error
        assert ended.ended is not None
        return ended.ended

    def _leave(self, ledger: Ledger, error: BaseException) -> None:
        """Ends or gives up what the error has broken off, in the background."""
        usage = self._answer.figures.dump()
        gone = isinstance(error, asyncio.CancelledError | Cancelled)
        if gone and self._past_deadline(DEADLINE_SLACK_S):
            self._cluster.background.spawn(ledger.finish(Reason.DEADLINE.value, usage))
        elif gone or isinstance(error, Unavailable | Overloaded):
            self._cluster.background.spawn(ledger.release(usage))
        else:
            self._cluster.background.spawn(ledger.finish(Reason.FAILED.value, usage))

    async def _decode(self, ledger: Ledger) -> Reason:
        """The answer, from verifier to verifier if need be."""
        failures = 0
        before_that: Callable[[], Coroutine[None, None, None]] | None = None
        while self._answer.reason is None:  # a verifier may have died between its last commit and the end
            before = self._answer.position
            try:
                if before_that is not None:
                    await self._wait(before_that(), ledger)
                before_that = None
                return await self._attempt(ledger)
            except DeadlineExceeded:
                return Reason.DEADLINE
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task and task.cancelling():
                    raise
                match self._halted:  # it was not us who were cancelled but what we wait for, by `_interrupt`
                    case OutriderError() as error:
                        raise error from None
                    case None if self._yields:
                        before_that = partial(self._make_room, ledger)
                    case None:
                        raise
                    case reason:
                        return reason
            except Overloaded as error:
                if before_that is not None:
                    raise
                before_that = partial(self._admitted.again, str(error))
            except Moved as error:
                await self._elsewhere(ledger, error, logging.INFO)
                before_that = self._other_verifier
            except Unavailable as error:
                failures = 1 if self._answer.position > before else failures + 1
                if before_that is not None or not self._started or failures >= ATTEMPTS:
                    raise
                await self._elsewhere(ledger, error, logging.WARNING)
        return self._answer.reason

    async def _elsewhere(self, ledger: Ledger, error: OutriderError, level: int) -> None:
        """The verifier is lost: the next one is another, if possible who has the KV."""
        self._cluster.metrics.moves += 1
        log.log(level, "session %s moves to another verifier: %s", self.session_id, error)
        if self._standby is not None:
            self._holder = self._standby.holder
        await ledger.reacquire()

    async def _wait(self, work: Coroutine[None, None, None], ledger: Ledger) -> None:
        """Waits for it and keeps our lease. Raises DeadlineExceeded in time, and CancelledError once it is halted."""
        self._pause = pause = asyncio.create_task(work)
        if self._halted is not None:
            pause.cancel()
        deadline, beat_s = self._opened.turn.deadline, self._cluster.config.lease_s / BEATS
        try:
            while not pause.done():
                left_s = beat_s if deadline is None else max(0.0, deadline - time.time())
                await asyncio.wait({pause}, timeout=min(left_s, beat_s))
                if self._past_deadline() and not pause.done():
                    raise DeadlineExceeded("the call's time ran out while it waited")
                if ledger.idle_s > beat_s:
                    await ledger.renew()
            pause.result()
        finally:
            pause.cancel()

    async def _make_room(self, ledger: Ledger) -> None:
        """Gives our place to those that wait, and gets one in its turn once the client has read on. Raises as
        `Place.take_turn`."""
        self._admitted.leave()
        await self._outbox.caught_up()
        self._yields = False
        await self._admitted.take_turn()
        await ledger.reacquire()  # the verifier that it left may not have noticed yet

    async def _other_verifier(self) -> None:
        """Waits until there is one. Raises Unavailable when there is none for long."""
        give_up = time.monotonic() + MOVE_S
        while True:
            try:
                await suitable(self._cluster, self._opened.model)
                return
            except Unavailable:
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(LOOK_S)

    async def _attempt(self, ledger: Ledger) -> Reason:
        """The rest of the answer, from one verifier."""
        async with self._placed(ledger) as stream:
            self._holder = stream.worker.worker_id
            self._drafters = self._draft(ledger, stream)
            try:
                self._start(stream.cached)
                self._follows = True
                return await self._follow(ledger, stream)
            finally:
                self._follows = False
                self._drafters.dismiss()

    @asynccontextmanager
    async def _placed(self, ledger: Ledger) -> AsyncIterator[DecodeStream]:
        """A place on the first verifier that has one: where its KV is, else the least loaded."""
        fleet, contract = self._cluster.fleet, self._opened.turn.contract
        workers = check_fits(
            ledger.tokens, contract, await suitable(self._cluster, self._opened.model), self._answer.start
        )
        refusal: OutriderError | None = None
        for worker in fleet.best_first(workers, self._holder, ledger.tokens, self.tenant):
            fleet.take(worker)
            began = time.monotonic()
            try:
                with calling("outrider.v1.Verifier/Decode") as span:
                    self._stream = stream = DecodeStream(worker, fleet.channel(worker), self._decode_start(ledger))
                    span.add_event("plan", plan_attributes(self._plan))
                    if self._halted is not None:
                        stream.cancel()
                    await stream.open()
                    yield stream
                    return
            except (Unavailable, Overloaded) as error:
                fleet.failed(worker, error)
                if stream.opened:
                    raise
                if not isinstance(refusal, Overloaded):  # where there is no room now there will be
                    refusal = error
            finally:
                if stream.over:
                    self._cluster.background.spawn(stream.finish())
                else:
                    stream.cancel()
                fleet.release(worker, time.monotonic() - began if stream.opened else 0.0)
        assert refusal is not None  # there is at least one verifier
        raise refusal

    def _decode_start(self, ledger: Ledger) -> Start:
        config, record, turn = self._cluster.config, self._opened.record, self._opened.turn
        return Start(
            session_id=self.session_id,
            tenant=record.tenant,
            epoch=ledger.epoch,
            model=record.model,
            tokenizer_digest=record.tokenizer_digest,
            tokens=tuple(ledger.tokens),
            digest=self._answer.digest,
            answer_position=turn.answer_position,
            contract=self._lecture.contract(turn.contract),
            plan=self._plan,
            window=config.window,
            lease_s=config.lease_s,
            timeout_s=None if turn.deadline is None else max(0.0, turn.deadline - time.time()),
        )

    def _draft(self, ledger: Ledger, stream: DecodeStream) -> Drafters:
        wanted = self._cluster.config.drafters_per_session if self._plan.depth and not stream.worker.treeless else 0
        contract = self._opened.turn.contract
        single = rule_of(contract).drawn is Drawn.SAMPLED  # what is drawn beside others is not drawn from one q
        post = Post(
            session_id=self.session_id,
            tenant=self._opened.record.tenant,
            epoch=ledger.epoch,
            upstream=stream.worker,
            tokenizer_digest=self._opened.model.digest,
            greedy=contract.greedy,
            single=single,
            before=ledger.record.drafters,
        )
        cluster = self._cluster
        wanted = min(wanted, 1) if single else wanted
        return Drafters(cluster.fleet, cluster.background, post, wanted, cluster.tiers, cluster.ticket_key)

    def _start(self, cached: int) -> None:
        """Sends where the client stands, once, and what it lacks of what is durable."""
        if self._started:
            return
        self._started = True
        opened = self._opened
        self._outbox.put(
            Started(
                session_id=self.session_id,
                generation=opened.record.generation,
                model=opened.model.name,
                seed=opened.turn.contract.seed,
                prompt_tokens=self._answer.start,
                cached_tokens=min(cached, self._answer.start),
                forked_from=opened.forked_from,
            )
        )
        self._outbox.replay(opened.missing, self._answer.position, self._answer.text_offset)
        self._watch_client()

    async def _follow(self, ledger: Ledger, stream: DecodeStream) -> Reason:
        """Every commit: log it, acknowledge it, pass it on, learn from it."""
        answer, policy, metrics = self._answer, self._opened.policy, self._cluster.metrics
        statuses = StepStatuses(self._cluster.config, policy, stream.worker)
        while not isinstance(event := await stream.next(), End):
            if not isinstance(event, Commit):
                if ledger.idle_s > self._cluster.config.lease_s / BEATS:
                    await ledger.renew()
                if self._past_deadline():
                    return Reason.DEADLINE
                continue
            part = answer.take(self._lecture.heard(event))
            self._admitted.spend(said=len(part.tokens))
            asked = time.monotonic()
            await ledger.append(
                part.tokens,
                answer.digest,
                logprobs=part.logprobs,
                plan=self._plan,
                verifier=stream.worker.worker_id,
                drafters=self._drafters.names,
            )
            self._lecture.durable(ledger.tokens, len(part.tokens), event)
            metrics.append.record(time.monotonic() - asked)
            metrics.tokens[self.model] += len(part.tokens)
            metrics.stepped(self._drafters.names, event.report, event.owed)
            self._outbox.put(part)
            self._acknowledge()
            self._watch_client()
            if self._standby is not None:
                self._standby.follow(ledger.tokens, stream.worker)
            self._note(event.report, statuses)
            if answer.stopped:
                return Reason.STOP
            self._drafters.observe(len(event.tokens), event.report.drafters, event.owed)
            policy.observe(event.report)
            plan = policy.plan()
            if plan is not self._plan:
                self._change(plan, ledger, stream)
        if answer.reason is None:
            raise InternalError(f"verifier {stream.worker.worker_id} ended the answer before its contract did")
        return answer.reason

    def _note(self, report: StepReport, statuses: StepStatuses) -> None:
        """Keeps whether the step verified drafts, and if not, why."""
        status = statuses.of(report, self._plan, self._drafters.hindrance)
        self.figures.speculation.observe(status)
        self._cluster.metrics.speculation[self.model, status.reason.value] += 1

    def _change(self, plan: Plan, ledger: Ledger, stream: DecodeStream) -> None:
        """Follows another plan. Drafters that are of no use now go to others."""
        paid, self._plan = self._plan.depth > 0, plan
        self._cluster.metrics.changes += 1
        if (span := recording()) is not None:
            span.add_event("plan", plan_attributes(plan))
        stream.plan(plan)
        if paid != (plan.depth > 0):
            self._drafters.dismiss()
            self._drafters = self._draft(ledger, stream)

    def _acknowledge(self) -> None:
        """Has the verifier go on as far as the log and the client allow."""
        if self._stream is not None:
            self._stream.acknowledge(self._outbox.limit)

    def _watch_client(self) -> None:
        """Looks at the client in a moment, and again until it has been sent everything."""
        if self._glance is None:
            self._glance = asyncio.get_running_loop().call_later(GLANCE_S, self._look_at_client)

    def _look_at_client(self) -> None:
        """Makes room where the client is behind and others wait; gives the generation up when it does not read at
        all."""
        self._glance = None
        if self._outbox.empty:
            return
        if self._outbox.stalled:
            self._halt(Unavailable(NOT_READ))
            return
        behind = self._outbox.behind and self._outbox.waits_s >= GLANCE_S
        if behind and self._follows and self._cluster.admission.waited_for(self._admitted.claim):
            self._yields = True
            self._interrupt()
        self._watch_client()

    @property
    def _admitted(self) -> Place:
        """Its place, which every generation has that has not ended."""
        assert self._place is not None
        return self._place

    def _past_deadline(self, slack_s: float = 0.0) -> bool:
        deadline = self._opened.turn.deadline
        return deadline is not None and time.time() >= deadline - slack_s
