"""The verifier's step scheduler: each step chooses work, runs the target, walks the trees and commits.

A step takes every session that is ready to decode, so none waits for another: the root alone, or the root and the best
nodes of its tree. It also takes one chunk of the prompts that are still to be read, in turns that are fair between
tenants. With heads on the target, it drafts after the commit.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from outrider.core.acceptance import VerifiedRows, Walk
from outrider.core.control.arms.arm import Arm
from outrider.core.control.arms.governor import Governor
from outrider.core.control.arms.overlap import OverlapMode
from outrider.core.control.arms.steering import SessionTokens, Steering
from outrider.core.control.cost.budget import CostModel, VerificationBudget, choose_budget
from outrider.core.control.cost.plain_pace import PlainPace
from outrider.core.control.holds.hold_policy import HoldPolicy
from outrider.core.sampling.grammar import GrammarDelayed
from outrider.core.sampling.noise import Draw
from outrider.core.session.contract import OFF, Contract
from outrider.core.session.digest import NOTHING, Prefix
from outrider.core.tree.node import Node
from outrider.engine.executor import Executor
from outrider.engine.following import FollowingPass
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.logits import Logits
from outrider.engine.kv.kv_slots import KvSlots
from outrider.errors import Moved, Superseded
from outrider.rpc.liveness import WorkClock
from verifier_svc.batch import SessionWork, StepBatch, StepVerdicts, make_masks, make_noise, step_report, until_stop
from verifier_svc.commit_queue import StepCommit
from verifier_svc.feature_store import FeatureFuser, NoFeatureFuser
from verifier_svc.kv_memory import KvMemory
from verifier_svc.metrics import StepMetrics
from verifier_svc.prefill_order import PrefillOrder, chunk_beside_others
from verifier_svc.proposers.head_proposer import HeadProposer, NoHeadProposer
from verifier_svc.proposers.lookahead import advance, look_ahead, settle
from verifier_svc.proposers.ngram_proposer import NgramProposers
from verifier_svc.session import PrefillSession, SessionStart, VerifierSession
from verifier_svc.step_broadcast import step_tree
from verifier_svc.timing import StepTime, StepTimes

SHUTTING_DOWN = "this verifier is going down; ask another one"
PREFILL = Contract(seed=0, max_tokens=1)  # of a text that is only prefilled
FAIR_SHARES = 2  # equal shares of a step's nodes that one session may have: overrated drafts starve no other session
LEAST_SHARE = 4
ID_CHARACTERS = 8  # of sessions that estimates() names
MAX_LISTED = 200
GRAMMARS_S = 0.01  # seconds that a step waits for grammars' processes

log = logging.getLogger(__name__)

SessionCommit = tuple[SessionWork, StepCommit]


class StepScheduler:
    """Owns the engine and the sessions, and runs the steps.

    It calls `publish` with every commit before the next step starts. It calls `pause` with a session whose step has
    begun, because nodes that drafters send now come too late for that step.
    """

    def __init__(
        self,
        engine: Engine,
        cost: CostModel,
        *,
        prefill_chunk: int,
        max_nodes: int,
        publish: Callable[[VerifierSession, int, Sequence[int]], None],
        pause: Callable[[VerifierSession], None] = lambda session: None,
        ngram_proposers: NgramProposers | None = None,
        head_proposer: HeadProposer | None = None,
        feature_fuser: FeatureFuser | None = None,
        pinned: Arm | None = None,
    ) -> None:
        """`pinned`: the only arm that is in force; None: that which measurements choose."""
        self.sessions: dict[str, VerifierSession] = {}
        self.freed = asyncio.Event()  # set whenever a slot is released
        self.progress = WorkClock()
        self.times = StepTimes()
        self.metrics = StepMetrics()
        self.slots = KvSlots(engine.slots, rewinds=not engine.treeless)
        self.cost = cost
        self._engine = engine
        self._prefill_chunk = prefill_chunk
        self._max_nodes = 0 if engine.treeless else max_nodes
        self._publish = publish
        self._pause = pause
        self._ngram_proposers = ngram_proposers or NgramProposers()
        self._head_proposer = head_proposer or NoHeadProposer()
        self._feature_fuser = feature_fuser or NoFeatureFuser()
        self._executor = Executor(engine)
        self._memory = KvMemory(engine, self._executor, self.slots, max_nodes)
        self._prefill_order = PrefillOrder()
        self.hold_policy = HoldPolicy()
        self.steering = Steering(Governor(PlainPace(cost.points()), pinned=pinned), cost)
        self._in_pass: Sequence[VerifierSession] = ()  # sessions in the running pass
        self._begun: StepBatch | None = None  # the step whose pass the engine has begun by itself
        self._unlearned: Callable[[], None] | None = None  # learns from the latest step
        self._opened = 0  # sessions
        self._others_wait = False  # sessions that are not in the running pass, and could be in the next one
        self._pass_ended = 0.0  # when the last pass ended
        self._committed = 0.0  # when its commits went out
        self._known_drafters: deque[str] = deque(maxlen=MAX_LISTED)  # the latest that have connected
        self._changed = asyncio.Event()
        self._drained: Callable[[], None] | None = None  # while going down: called once all sessions are closed
        self._stopped = False

    def open(self, start: SessionStart) -> VerifierSession:
        """Give a session a KV slot, if possible one that holds the KV of its first tokens.

        A session that is open under an older epoch is closed as fenced, and its KV stays for the new one. Raises
        Superseded for an epoch that is not newer, Overloaded when all slots are in use, Moved when this verifier is
        going down.
        """
        if self.draining:
            raise Moved(SHUTTING_DOWN)
        present = self.sessions.get(start.session_id)
        if present:
            if start.epoch <= present.epoch:
                raise Superseded(f"session {start.session_id} is owned under epoch {present.epoch}")
            present.commits.fenced = True
            self.close(present)
        kv_slot = self.slots.acquire(start.tokens, start.kv_scope, start.session_id)
        self._executor.prepare_slot(kv_slot)
        proposer = self._ngram_proposers.begin(start.tenant, start.contract)
        heads = self._head_proposer.open(start.contract, kv_slot, self._executor)
        patterns = start.contract.own_or_shared(self.hold_policy.patterns(greedy=start.contract.greedy))
        engine = self._engine
        session = VerifierSession(
            start, kv_slot, engine.vocabulary, patterns, proposer, heads, unpadded_vocabulary=engine.unpadded_vocabulary
        )
        session.fused = self._feature_fuser.open(kv_slot, self._executor)
        if session.grammar is not None:
            session.grammar.on_change = self.wake
        self.sessions[session.id] = session
        self._opened += 1
        self.steering.on_opened(self.sessions.values())
        self.wake()
        return session

    async def prefill(
        self,
        tokens: Sequence[int],
        tenant: str,
        known: Prefix = NOTHING,
        contract: Contract = PREFILL,
        adapter: object | None = None,
    ) -> int:
        """Prefill a text; its KV stays in a free slot. Return how many tokens have KV. Raises as `open`.

        `known`: the digest of a prefix of the tokens, as a token tree takes it; `contract`: PREFILL, with an adapter
        where the text has one; `adapter`: that as the engine has loaded it.
        """
        if self.draining:
            raise Moved(SHUTTING_DOWN)
        name = f"reading {secrets.token_hex(8)}"
        start = SessionStart(name, tenant, 0, tokens, len(tokens), contract, OFF, 1, known, adapter=adapter)
        kv_slot = self.slots.acquire(tokens, start.kv_scope)
        self._executor.prepare_slot(kv_slot)
        self._head_proposer.open(PREFILL, kv_slot, self._executor)
        self._feature_fuser.open(kv_slot, self._executor)
        session = PrefillSession(start, kv_slot, self._engine.vocabulary, self.hold_policy.patterns(greedy=True), None)
        self.sessions[session.id] = session
        self._opened += 1
        self.wake()
        try:
            if session.ready:
                await session.commits.get()
        finally:
            self.close(session)
        return session.cached

    def close(self, session: VerifierSession) -> None:
        """End a session: no new step starts for it, and its KV stays until memory is needed. Closing it again changes
        nothing.

        A pass that runs writes only behind the rows that count, so the slot may be acquired at once. Where the engine
        cannot take rows back, none of the slot's KV counts then.
        """
        if self.sessions.get(session.id) is not session:
            return
        del self.sessions[session.id]
        session.finished = True
        if session.grammar is not None:
            session.grammar.close()
        session.record_answer()
        session.commits.close()
        session.broadcast.close()
        lost = self._engine.treeless and session in self._in_pass
        held = [] if lost else session.tokens[: session.cached]
        self.slots.release(session.kv_slot.slot, held, session.kv_scope, session.id)
        self._executor.release(session.kv_slot.slot, len(held))
        self.freed.set()
        self.wake()  # there may be memory for another session
        session.dismiss("fenced" if session.commits.fenced else "finished")

    @property
    def preempted(self) -> int:
        """How often a session's KV was released for lack of memory."""
        return self._memory.preempted

    def estimates(self) -> dict[str, Any]:
        """Return what steps are decided from. May be called in another thread."""
        return {
            "pass": [{"tokens": tokens, "seconds": seconds} for tokens, seconds in self.cost.points()],
            "steering": self.steering.estimates(),
            "arrivals": self.hold_policy.estimates(),
            "ngram_proposers": self._ngram_proposers.estimates(),
            "sessions": [
                {"session": session.id[:ID_CHARACTERS], **session.terms.estimates()}
                for session in itertools.islice(tuple(self.sessions.values()), MAX_LISTED)
            ],
        }

    @property
    def draining(self) -> bool:
        """Whether this verifier is going down."""
        return self._stopped or self._drained is not None

    def begin_drain(self, drained: Callable[[], None]) -> None:
        """Start no further step. After the running step, close all sessions as moved and call `drained`."""
        self._drained = drained
        self.wake()
        if self._stopped:
            drained()

    def on_drafter_connected(self, drafter_id: str) -> None:
        """Try soon again what did not pay, if it is a drafter that was not here lately."""
        if drafter_id not in self._known_drafters:
            self._known_drafters.append(drafter_id)
            self.steering.governor.reconsider()

    def wake(self) -> None:
        """Wakes the scheduler: something changed that may make a session ready or a tree better."""
        self._changed.set()

    async def run(self) -> None:
        """Run steps until cancelled. Stops when it ends, for whatever reason."""
        try:
            while True:
                await self.step()
        finally:
            self.stop()

    async def step(self) -> StepBatch:
        """Run one step, once a session is ready. Returns it when its tokens are committed."""
        await self._follow_grammars()
        step = await self._choose()
        logits = await self._forward(step)
        walks = self._walk(step, logits)
        self._head_proposer.store(step, walks, self._executor)
        await self._feature_fuser.store(step, walks, self._executor)
        commits = self._commit(step, walks)
        self._unlearned = partial(self._learn, step, commits)
        if not self._engine.apart:  # else commits are sent, and learned from, while the next pass runs
            await asyncio.sleep(0)  # the commits are sent before anything is learned, drafted or chosen
            self._learn_latest()
        await self._head_proposer.draft(step, self._executor)
        return step

    def stop(self) -> None:
        """Close all sessions as moved, and the engine. No step may follow."""
        self._stopped = True
        self._close_all(self._drained or (lambda: None))
        self._executor.close()

    async def _choose(self) -> StepBatch:
        """Return the next step: the best nodes of all trees.

        Wait until a session is ready, and then for as long as a better tree is worth more than the time.
        """
        waited, back_to_back = 0.0, bool(self._pass_ended)
        incomplete: VerifierSession | None = None  # a session whose plan forbids a step over its present tree
        while True:
            await self._memory.prepare()
            self._changed.clear()
            self._end_failed()
            if self._drained is not None:
                self._close_all(self._drained)
            if (begun := self._begun_step()) is not None:
                return begun
            ready = self._prefill_order.sort(self._memory.schedulable(self.sessions.values()))
            for session in ready:
                session.propose_forced()
            if not ready:
                self._learn_latest()
                back_to_back = False
                await self._executor.wait_idle(self._changed)
                continue
            now = time.monotonic()
            works = self.base_works(ready)
            may_hold = self._max_nodes and all(work.chooses for work in works)  # no prompt is read in this step
            hold = 0.0
            if may_hold:  # the session that held the step back is asked first: each of its deltas leads here
                sessions = sorted((work.session for work in works), key=lambda session: session is not incomplete)
                incomplete, hold = self.hold_policy.required_hold(sessions, now)
            if hold <= 0.0:
                step, budget = self.select(works, now)
                lately = self.steering.tokens_per_s
                hold = self.hold_policy.hold_seconds(step.sessions, budget, now, lately) if may_hold else 0.0
                if hold <= 0.0:
                    step.waited, step.back_to_back = waited, back_to_back
                    return step
            held = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(hold):
                    await self._changed.wait()
            waited += time.monotonic() - held

    async def _follow_grammars(self) -> None:
        """Wait a moment for what grammars force behind the latest commits. Sessions whose grammars take longer join a
        later step."""
        ends = time.monotonic() + GRAMMARS_S
        while late := [grammar for it in self.sessions.values() if (grammar := it.awaited_grammar) is not None]:
            left = ends - time.monotonic()
            if left <= 0.0:
                for grammar in late:
                    grammar.mark_slow()
                break
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _end_failed(self) -> None:
        """End the sessions whose grammars can be followed no longer."""
        for session in [*self.sessions.values()]:
            if session.grammar is not None and session.grammar.failure is not None:
                session.commits.failure = session.grammar.failure
                self.close(session)

    def _begun_step(self) -> StepBatch | None:
        """Return the step whose pass the engine has begun, without the sessions that have ended since."""
        begun, self._begun = self._begun, None
        sessions = [it for it in begun.sessions if it.ready and it.unread == 1] if begun is not None else []
        if begun is None or not sessions:
            return None
        works = [SessionWork(session, session.cached, session.cached + 1) for session in sessions]
        return StepBatch(works, begun.price, begun.rate, back_to_back=True, begun=True)

    def _close_all(self, drained: Callable[[], None]) -> None:
        for session in [*self.sessions.values()]:
            session.commits.moved = True
            self.close(session)
        drained()

    def select(self, works: list[SessionWork], now: float) -> tuple[StepBatch, VerificationBudget]:
        """Add the best nodes of all trees to the works. Returns the step, and the budget that it keeps to."""
        base = sum(work.end - work.start for work in works)
        rows: dict[Node, int] = {}
        decoding = [work for work in works if work.chooses]
        certain = len(decoding) + self._add_full_trees(decoding, rows)
        base += len(rows)
        deciding = [work for work in decoding if not work.session.terms.takes_full_tree]
        share = max(LEAST_SHARE, FAIR_SHARES * self._max_nodes // max(1, len(deciding)))
        offers = [_offers(work, min(share, work.session.ceilings.nodes)) for work in deciding]
        ranked = list(itertools.islice(heapq.merge(*offers, key=_score_of), self._max_nodes))
        passed = min(now - self._pass_ended, self.cost.seconds(base))  # an idle scheduler has not waited for this step
        outside = max(passed, self.cost.overhead(len(works)))
        prompt_tokens = base - len(decoding) - len(rows)
        certain += self.cost.in_tokens(len(decoding), prompt_tokens)
        scores = [-cost for cost, _, _ in ranked]
        budget = choose_budget(scores, base, certain, self.cost, outside)
        ahead, price = look_ahead(deciding, base, budget, self.cost, self.times, self._max_nodes)
        if ahead:
            budget = choose_budget(scores[: self._max_nodes - ahead], base + ahead, certain + price, self.cost, outside)
        for score, work, node in ranked[: budget.nodes]:
            work.add(node, -score, rows)
        return StepBatch(works, budget.price, budget.expected / budget.seconds, prompt_tokens), budget

    def _add_full_trees(self, works: Sequence[SessionWork], rows: dict[Node, int]) -> float:
        """Add the trees that a step takes complete, level by level. Return their expected accepted tokens.

        Choosing nodes of a sampled tree by their scores would bias the text (docs/protocol.md, section 12). For the
        same reason a session is charged for the nodes that its plan allows, and not for those that it has.
        """
        expected, left = 0.0, self._max_nodes
        for work in works:
            session = work.session
            allowed = session.ceilings.nodes
            if not session.terms.takes_full_tree or allowed > left:
                continue
            left -= allowed
            for level in itertools.islice(session.tree.levels(), min(session.ceilings.depth, session.room - 1)):
                if len(work.nodes) + len(level) > allowed:
                    break
                for node in level:
                    score = session.tree.score(node)
                    expected += score
                    work.add(node, score, rows)
        return expected

    def base_works(self, ready: Sequence[VerifierSession]) -> list[SessionWork]:
        """Return the roots of all sessions that decode, and a chunk of the prompts that others have to read first."""
        works, chunk = [], chunk_beside_others(ready, self._prefill_chunk, self.cost)
        for session in ready:
            pending = session.unread
            taken = pending if pending == 1 else min(pending, chunk)
            chunk -= taken if pending > 1 else 0
            if taken:
                works.append(SessionWork(session, session.cached, session.cached + taken))
        return works

    async def _forward(self, step: StepBatch) -> Logits:
        """Run the packed pass, and compute the noise meanwhile. Return the logits."""
        segments = [work.segment() for work in step.works]
        draws = [work.draw(self._engine) for work in step.works]
        began = time.monotonic()
        self.progress.begin()
        self._in_pass = step.sessions
        meanwhile = partial(self._meanwhile, step, draws)
        if self._engine.runs_on and all(work.goes_on for work in step.works):
            logits, slots = await self._executor.run_on(segments, draws, self._following(step), meanwhile)
            if going_on := [work for work in step.works if work.session.kv_slot.slot in slots]:
                self._begun = StepBatch(going_on, step.price, step.rate)
        else:
            logits = await self._executor.sample(segments, draws, meanwhile)
        before, self._pass_ended = self._pass_ended, time.monotonic()
        self._in_pass = ()
        began = before if step.begun else began
        step.began, step.seconds = began, self._pass_ended - began
        if step.begun:
            self.times.add(StepTime(step.tokens, step.seconds, 0.0, 0.0))
        elif step.back_to_back:
            overhead = began - before - step.waited
            self.times.add(StepTime(step.tokens, step.seconds, step.waited, overhead))
            self.cost.observe_overhead(len(step.works), overhead)
        self.progress.end()
        self.cost.observe(step.tokens, step.seconds)
        return logits

    def _following(self, step: StepBatch) -> FollowingPass:
        """Return what may follow a step's pass at once: the next rows of its sessions, if no other session waits."""
        opened = self._opened
        stop_ids = [it.contract.stop_ids if it.room > 1 else None for it in step.sessions]
        return FollowingPass(lambda: self._opened == opened and not self._others_wait, stop_ids)

    def _meanwhile(self, step: StepBatch, draws: Sequence[Draw | None]) -> None:
        """While the pass runs: pauses the drafters that alternate with it, and computes noise and masks."""
        for session in step.sessions:
            if session.terms.overlap_mode is OverlapMode.TURNS and session.drafting:
                self._pause(session)
        make_noise(step, draws)
        make_masks(step)
        self._learn_latest()
        members = {*step.sessions}
        self._others_wait = any(it.ready and it not in members for it in self.sessions.values())

    def _walk(self, step: StepBatch, logits: Logits) -> list[Walk | None]:
        """For each session, walk the target's tokens as far as the tree holds them; None inside a prompt.

        None also where what the grammar allows is not known in time: such a session has no part in the step.
        """
        walks: list[Walk | None] = []
        first = 0
        for work in step.works:
            if not work.chooses:
                walks.append(None)
                continue
            verdicts = StepVerdicts(work, logits, first)
            first += work.outputs
            rows = VerifiedRows([-1, *work.parents], [-1, *(node.token for node in work.nodes)])
            try:
                walks.append(work.session.rule.walk(rows, verdicts, verdicts.random_source()))
            except GrammarDelayed:
                work.delayed = True
                walks.append(None)
                continue
            advance(work, verdicts)
        return walks

    def _commit(self, step: StepBatch, walks: Sequence[Walk | None]) -> list[SessionCommit]:
        """Commit for each session: keep accepted nodes' KV, append tokens, re-root trees, publish."""
        now = time.monotonic()
        self._ngram_proposers.renew_allowance()
        rates = self.steering.rates() if self.steering.overlap_mode is OverlapMode.REST else (0, 0)
        commits: list[SessionCommit] = []
        for work, walked in zip(step.works, walks, strict=True):
            if (read := work.end - work.start) > 1:
                self._prefill_order.add(work.session.tenant, read)
            if work.session.finished or work.delayed:  # closed while the pass ran, or its row is computed again
                continue
            if walked is None:
                self._end_prefill(step, work)
            else:
                commits.append((work, self._commit_work(step, work, walked, now, rates)))
        for work, commit in commits:
            self._publish(work.session, commit.position, [choice.token for choice in commit.choices])
        step.since_last, self._committed = now - self._committed, now
        return commits

    def _learn_latest(self) -> None:
        """Learn from the latest step, unless that is done."""
        learn, self._unlearned = self._unlearned, None
        if learn is not None:
            learn()

    def _learn(self, step: StepBatch, commits: Sequence[SessionCommit]) -> None:
        """Learn from a step whose commits have been sent, and counts it."""
        if step.back_to_back:
            made = [SessionTokens(work.session, len(commit.choices), work.expected) for work, commit in commits]
            self.steering.on_step(self.sessions.values(), made, step.prompt_tokens, step.since_last)
        else:
            self.steering.on_unmeasured_step(self.sessions.values())
        self.metrics.record_pass(step.tokens, step.seconds, step.waited)
        for work, commit in commits:
            self.metrics.record_commit(commit.report, len(commit.choices), work.session.contract.adapter)

    def _end_prefill(self, step: StepBatch, work: SessionWork) -> None:
        """Count the rows of a prompt's chunk as read."""
        session = work.session
        session.cached = work.end
        self.slots.mark_computed(session.kv_slot.slot, session.cached)
        session.propose_ngrams()
        if session.traced is not None:
            session.traced.on_prefill(step.figures, work.start, work.end)
        if isinstance(session, PrefillSession) and not session.ready:
            self.close(session)

    def _commit_work(
        self, step: StepBatch, work: SessionWork, walked: Walk, now: float, rates: tuple[int, int]
    ) -> StepCommit:
        """Commit what the walk chose for one session: as far as the generation may go, and to its first stop token.

        `rates`: see `step_report`.
        """
        session, nodes = work.session, work.nodes
        choices = until_stop(walked.choices[: session.end - len(session.tokens)], session.contract.stop_ids)
        kept = walked.path[: len(choices)]
        path = [nodes[row - 1] for row in kept]
        accepted = set(path)
        report = step_report(step, work, path, now, rates)
        if session.broadcast.watched:
            session.broadcast.show(step_tree(session, session.public_senders, nodes, path, choices, report))
        traced = session.traced
        pending = None if traced is None else traced.before_commit(session.tree, nodes)
        settle(work, path, choices, step.price)
        if session.heads is not None:
            session.heads.settle(session.tree, path, [choice.token for choice in choices])
        session.calibrate_verified(nodes, accepted)
        drafter_credits = session.credits(nodes, accepted)
        session.terms.verified_price = step.price
        session.wire_bytes = 0
        commit = session.commit(choices, report, now, drafter_credits)
        self._keep(work, kept)
        if traced is not None and pending is not None:
            traced.after_commit(
                session, self.steering.attributes(session), step.figures, pending, len(choices), len(path)
            )
        return commit

    def _keep(self, work: SessionWork, path: Sequence[int]) -> None:
        """Move the accepted rows up behind the committed ones. The root's own row is one of the pending rows."""
        session = work.session
        chain = work.end - work.start
        if path and path[-1] != len(path):
            source = session.cached + chain - 1 + np.array(path)
            target = session.cached + chain + np.arange(len(path))
            self._executor.move(session.kv_slot.slot, source, target)
        session.cached += chain + len(path)
        self.slots.mark_computed(session.kv_slot.slot, session.cached)


def _offers(work: SessionWork, limit: int) -> list[tuple[float, SessionWork, Node]]:
    """Return at most `limit` of a session's nodes, best first, with negated scores so that merging keeps the order.

    No node is so deep that its path and the token after it would exceed what the step may commit.
    """
    plan = work.session.ceilings
    depth = min(plan.depth, work.session.room - 1)
    return [(-score, work, node) for score, node in work.session.tree.best(limit, depth=depth, width=plan.width)]


def _score_of(offer: tuple[float, SessionWork, Node]) -> float:
    return offer[0]
