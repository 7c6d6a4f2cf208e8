"""The verifier's step scheduler: each step chooses work, runs the target, walks the trees and commits.

A step takes every session that is ready to decode, so none waits for another: the root alone, or the root and the best
nodes of its tree. It also takes one chunk of the prompts that are still to be read, in turns that are fair between
tenants. With heads on the target, it drafts after the commit.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from outrider.core.acceptance import VerifiedRows, Walk
from outrider.core.control.arms.arm import Arm, OverlapMode
from outrider.core.control.cost.budget import CostModel
from outrider.core.sampling.grammar import GrammarDelayed
from outrider.core.sampling.noise import Draw
from outrider.engine.executor import Executor
from outrider.engine.following import FollowingPass
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.logits import Logits
from outrider.rpc.liveness import WorkClock
from verifier_svc.batch import SessionWork, StepBatch, StepVerdicts, make_masks, make_noise, step_report, until_stop
from verifier_svc.commit_queue import StepCommit
from verifier_svc.feature_store import FeatureFuser
from verifier_svc.open_sessions import OpenSessions
from verifier_svc.proposers.head_proposer import HeadProposer
from verifier_svc.proposers.lookahead import advance, settle
from verifier_svc.proposers.ngram_proposer import NgramProposers
from verifier_svc.session import PrefillSession, VerifierSession
from verifier_svc.steps.step_choice import StepChoice
from verifier_svc.steps.step_learning import SessionCommit, StepLearning
from verifier_svc.tracing import step_tree

ID_CHARACTERS = 8  # of sessions that estimates() names
MAX_LISTED = 200


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
        self.progress = WorkClock()
        self.learning = StepLearning(cost, pinned)
        self._engine = engine
        self._publish = publish
        self._pause = pause
        self._ngram_proposers = ngram_proposers or NgramProposers()
        self._head_proposer = head_proposer or HeadProposer()
        self._feature_fuser = feature_fuser or FeatureFuser()
        self._executor = Executor(engine)
        self._changed = asyncio.Event()
        proposers = self._ngram_proposers, self._head_proposer, self._feature_fuser
        self.sessions = OpenSessions(self._executor, *proposers, self.learning, self.wake)
        parts = self._executor, self.sessions, self.learning, self._changed
        self.choice = StepChoice(*parts, prefill_chunk=prefill_chunk, max_nodes=max_nodes)
        self._others_wait = False  # sessions that are not in the running pass, and could be in the next one
        self._committed = 0.0  # when the last step's commits went out
        self._known_drafters: deque[str] = deque(maxlen=MAX_LISTED)  # the latest that have connected

    def estimates(self) -> dict[str, Any]:
        """Return what steps are decided from. May be called in another thread."""
        return {
            "pass": [{"rows": rows, "seconds": seconds} for rows, seconds in self.learning.cost.points()],
            "steering": self.learning.steering.estimates(),
            "arrivals": self.learning.hold_policy.estimates(),
            "ngram_proposers": self._ngram_proposers.estimates(),
            "sessions": [
                {"session": session.id[:ID_CHARACTERS], **session.terms.estimates()}
                for session in itertools.islice(tuple(self.sessions.values()), MAX_LISTED)
            ],
        }

    def on_drafter_connected(self, drafter_id: str) -> None:
        """Try soon again what did not pay, if it is a drafter that was not here lately."""
        if drafter_id not in self._known_drafters:
            self._known_drafters.append(drafter_id)
            self.learning.steering.governor.reconsider()

    def wake(self) -> None:
        """Wake the scheduler: something changed that may make a session ready or a tree better."""
        self._changed.set()

    async def run(self) -> None:
        """Run steps until cancelled, and stop, for whatever reason it ends."""
        try:
            while True:
                await self.step()
        finally:
            self.stop()

    async def step(self) -> StepBatch:
        """Run one step, once a session is ready. Return it when its tokens are committed."""
        await self.choice.follow_grammars()
        step = await self.choice.choose()
        logits = await self._forward(step)
        walks = self._walk(step, logits)
        self._head_proposer.store(step, walks, self._executor)
        await self._feature_fuser.store(step, walks, self._executor)
        commits = self._commit(step, walks)
        self.learning.on_commits(step, commits)
        if not self._engine.frees_host:  # else commits are sent, and learned from, while the next pass runs
            await asyncio.sleep(0)  # the commits are sent before anything is learned, drafted or chosen
            self.learning.learn_latest(self.sessions.values())
        await self._head_proposer.draft(step, self._executor)
        return step

    def stop(self) -> None:
        """Close all sessions as moved, and the engine. No step may follow."""
        self.sessions.stop()
        self._executor.close()

    async def _forward(self, step: StepBatch) -> Logits:
        """Run the packed pass, and compute the noise meanwhile. Return the logits."""
        segments = [work.segment() for work in step.works]
        draws = [work.draw(self._engine) for work in step.works]
        began = time.monotonic()
        self.progress.begin()
        self.sessions.in_pass = step.sessions
        meanwhile = partial(self._meanwhile, step, draws)
        if self._engine.begins_next_pass and all(work.goes_on for work in step.works):
            logits, slots = await self._executor.run_on(segments, draws, self._following(step), meanwhile)
            if going_on := [work for work in step.works if work.session.kv_slot.slot in slots]:
                self.choice.begun = StepBatch(going_on, step.min_path_score, step.rate)
        else:
            score = step.score if any(work.scored for work in step.works) else None
            logits = await self._executor.sample(segments, draws, meanwhile, then=score)
        self.learning.on_pass(step, began)
        self.sessions.in_pass = ()
        self.progress.end()
        return logits

    def _following(self, step: StepBatch) -> FollowingPass:
        """Return what may follow a step's pass at once: the next rows of its sessions, if no other session waits."""
        opened = self.sessions.opened
        stop_ids = [it.contract.stop_ids if it.room > 1 else None for it in step.sessions]
        return FollowingPass(lambda: self.sessions.opened == opened and not self._others_wait, stop_ids)

    def _meanwhile(self, step: StepBatch, draws: Sequence[Draw | None]) -> None:
        """While the pass runs: pauses the drafters that alternate with it, and computes noise and masks."""
        for session in step.sessions:
            if session.terms.overlap_mode is OverlapMode.TURNS and session.drafting:
                self._pause(session)
        make_noise(step, draws)
        make_masks(step)
        self.learning.learn_latest(self.sessions.values())
        members = {*step.sessions}
        self._others_wait = any(it.ready and it not in members for it in self.sessions.values())

    def _walk(self, step: StepBatch, logits: Logits) -> list[Walk | None]:
        """For each session, walk the target's tokens as far as the tree holds them; None inside a prompt.

        None also where what the grammar allows is not known in time: such a session has no part in the step.
        """
        walks: list[Walk | None] = []
        first = 0
        for work in step.works:
            verdicts = StepVerdicts(work, logits, first)
            first += work.outputs
            if not work.chooses:
                walks.append(None)
                continue
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
        rates = self.learning.steering.rates() if self.learning.steering.overlap_mode is OverlapMode.REST else (0, 0)
        commits: list[SessionCommit] = []
        for work, walked in zip(step.works, walks, strict=True):
            if (read := work.end - work.start) > 1:
                self.choice.prefill_order.add(work.session.tenant, read)
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

    def _end_prefill(self, step: StepBatch, work: SessionWork) -> None:
        """Count the rows of a prompt's chunk as read."""
        session = work.session
        session.cached = work.end
        self.sessions.slots.mark_computed(session.kv_slot.slot, session.cached)
        session.propose_ngrams()
        if work.scores is not None:
            session.send_scores(work.scores)
        if session.traced is not None:
            session.traced.on_prefill(step.figures, work.start, work.end)
        if isinstance(session, PrefillSession) and not session.ready:
            self.sessions.close(session)

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
        settle(work, path, choices, step.min_path_score)
        if session.heads is not None:
            session.heads.settle(session.tree, path, [choice.token for choice in choices])
        session.calibrate_verified(nodes, accepted)
        contributions = session.contributions(nodes, accepted)
        session.terms.verified_min_path_score = step.min_path_score
        session.wire_bytes = 0
        commit = session.commit(choices, report, now, contributions)
        self._keep(work, kept)
        if traced is not None and pending is not None:
            traced.after_commit(
                session, self.learning.steering.attributes(session), step.figures, pending, len(choices), len(path)
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
        self.sessions.slots.mark_computed(session.kv_slot.slot, session.cached)
