"""What a verifier learns from its steps: what they cost, how many tokens they bring, and what its metrics show."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from outrider.core.control.arms.arm import Arm
from outrider.core.control.arms.governor import Governor
from outrider.core.control.arms.steering import SessionTokens, Steering
from outrider.core.control.cost.budget import CostModel
from outrider.core.control.cost.plain_pace import PlainPace
from outrider.core.control.holds.hold_policy import HoldPolicy
from verifier_svc.batch import SessionWork, StepBatch
from verifier_svc.commit_queue import StepCommit
from verifier_svc.metrics import StepMetrics, StepTime, StepTimes
from verifier_svc.session import VerifierSession

SessionCommit = tuple[SessionWork, StepCommit]


class StepLearning:
    """Observes passes and commits. The next steps are chosen by its estimates."""

    def __init__(self, cost: CostModel, pinned: Arm | None) -> None:
        """`pinned`: the only arm that is in force; None: that which measurements choose."""
        self.times = StepTimes()
        self.metrics = StepMetrics()
        self.cost = cost
        self.steering = Steering(Governor(PlainPace(cost.points()), pinned=pinned), cost)
        self.hold_policy = HoldPolicy()
        self.pass_ended = 0.0  # when the last pass ended, by time.monotonic
        self._latest: tuple[StepBatch, Sequence[SessionCommit]] | None = None  # not yet learned from

    def on_pass(self, step: StepBatch, began: float) -> None:
        """Record the times of a pass that has just ended; the engine may have begun it before `began`."""
        before, self.pass_ended = self.pass_ended, time.monotonic()
        began = before if step.begun else began
        step.began, step.seconds = began, self.pass_ended - began
        if step.begun:
            self.times.add(StepTime(step.rows, step.seconds, 0.0, 0.0))
        elif step.back_to_back:
            overhead = began - before - step.waited
            self.times.add(StepTime(step.rows, step.seconds, step.waited, overhead))
            self.cost.observe_overhead(len(step.works), overhead)
        self.cost.observe(step.rows, step.seconds)

    def on_commits(self, step: StepBatch, commits: Sequence[SessionCommit]) -> None:
        """Have `learn_latest` learn from a step."""
        self._latest = step, commits

    def learn_latest(self, sessions: Collection[VerifierSession]) -> None:
        """Learn from the latest step and count it, unless that is done; `sessions` are those that are open now."""
        latest, self._latest = self._latest, None
        if latest is None:
            return
        step, commits = latest
        if step.back_to_back:
            made = [SessionTokens(work.session, len(commit.choices), work.expected) for work, commit in commits]
            self.steering.on_step(sessions, made, step.prompt_tokens, step.since_last)
        else:
            self.steering.on_unmeasured_step(sessions)
        self.metrics.record_pass(step.rows, step.seconds, step.waited)
        for work, commit in commits:
            self.metrics.record_commit(commit.report, len(commit.choices), work.session.contract.adapter)
