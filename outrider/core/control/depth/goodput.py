"""The goodput policy: the drafting depth with the most tokens per second, from measured times and acceptance rates.

The verifier takes only nodes that are worth their rows, so the only cost of a depth here is the time for which a step
is held back for it. A step commits 1 + the sum of the probabilities to reach each depth (OPT-Tree, arXiv 2406.17276,
section 3); it takes its own time plus the hold. This is TurboSpec's goodput (arXiv 2406.14066) with the round trip
included. All times are from the verifier's reports, so that a simulation can run the same code. See
docs/decisions/0012-goodput-decides-how-far.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.core.control.depth.acceptance_stats import GOODPUT, Acceptance, AcceptanceCounts
from outrider.core.session.contract import Plan, StepReport
from outrider.core.stats import Ema

SHOWN_DEPTHS = 8  # depths whose acceptance estimates() returns


@dataclass(frozen=True, slots=True)
class GoodputInputs:
    """Averages over one session's steps. Times are in seconds."""

    step: float  # from commit to commit, without holds
    first: float  # from a commit to the first level: round trip, queue, one pass of the drafter
    level: float  # for each further level
    hidden: float = 0.0  # drafting time that does not hold a step back
    others: float = 0.0  # tokens that other sessions commit in a step


def speed(depth: int, reach: Sequence[float], inputs: GoodputInputs) -> float:
    """Return the tokens per second of all sessions that share the steps, if this session is drafted `depth` levels.

    `reach` holds the probability that each depth is accepted: [>= depth].
    """
    held = max(0.0, inputs.first + (depth - 1) * inputs.level - inputs.hidden) if depth else 0.0
    return (inputs.others + 1.0 + sum(reach[:depth])) / (inputs.step + held)


def best_depth(reach: Sequence[float], inputs: GoodputInputs, slack: float = 0.0) -> int:
    """Return how deep drafters may run; 0 where plain decoding is as fast.

    The result is the deepest depth that is at most the share `slack` slower than the best one: the probabilities are
    averages, and where a path is more certain than average the verifier takes more of it.
    """
    speeds = [speed(depth, reach, inputs) for depth in range(len(reach) + 1)]
    enough = (1.0 - slack) * max(speeds)
    return 0 if speeds[0] == max(speeds) else max(depth for depth, each in enumerate(speeds) if each >= enough)


def average() -> Ema:
    """Return an average of some tens of the latest steps."""
    return Ema(GOODPUT.weight, warm_up=True)


@dataclass(slots=True)
class AcceptancePriors:
    """Statistics that sessions with the same target, drafters and kind of traffic share. Times are in seconds."""

    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    # The part of `counts` that was not sent to other routers yet.
    fresh: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    first: Ema = field(default_factory=average)  # from a commit to the first level
    level: Ema = field(default_factory=average)  # for each further level
    step: Ema = field(default_factory=average)  # from commit to commit, without holds
    hidden: Ema = field(default_factory=average)  # drafting time that does not hold a step back

    def observe(self, report: StepReport) -> None:
        """Add a step that verified at least one node."""
        self.counts.observe(report)
        self.fresh.observe(report)

    def times(self) -> dict[str, Ema]:
        """Return the averages by name."""
        return {"first": self.first, "level": self.level, "step": self.step, "hidden": self.hidden}

    def estimates(self) -> dict[str, Any]:
        """Return what is estimated of the target and its drafters."""
        return {
            "steps": self.counts.steps,
            "reach": Acceptance(self.counts).reach(SHOWN_DEPTHS),
            **{f"{name}_s": time.mean for name, time in self.times().items()},
        }


class Goodput:
    """Maximises the expected tokens per second of the sessions that share a verifier's steps.

    The policy sets a depth, from what is the session's own. The verifier decides whether it is drafted for at all, and
    within the depth which nodes and waits pay (docs/control.md).
    """

    def __init__(self, ceilings: Plan, priors: AcceptancePriors | None = None) -> None:
        """`priors` are shared with other sessions, and this session adds to them."""
        self._ceilings = ceilings
        self._priors = priors or AcceptancePriors()
        self._acceptance = Acceptance(self._priors.counts)
        self._own = average()  # tokens that a step commits for this session
        self._others = average()  # tokens that a step commits for all other sessions
        self._seconds = 0.0  # since the plan changed
        self._plan = replace(ceilings, version=1)
        if self._priors.counts.steps >= GOODPUT.min_prior_steps:
            self._plan = self._plan_with(self._wanted())

    def observe(self, report: StepReport) -> None:
        """Add one step, and change the plan where that pays."""
        if not report.elapsed_us or report.resting:
            return  # the time of the first token is that of the prompt, and a plain step shows nothing of drafters
        seconds = report.elapsed_us * 1e-6
        self._seconds += seconds
        self._learn(report, seconds)
        if self._seconds < GOODPUT.dwell_s:
            return
        wanted = self._wanted()
        if abs(wanted - self._plan.depth) >= max(2, self._plan.depth // 2):
            self._seconds, self._plan = 0.0, self._plan_with(wanted)

    def plan(self) -> Plan:
        """Return the ceilings with the present depth."""
        return self._plan

    def estimates(self) -> dict[str, Any]:
        """Return what is estimated of the session, beside the priors that it shares."""
        return {
            "depth": self._plan.depth,
            "wanted_depth": self._wanted() if self._priors.step.count else self._plan.depth,
            "reach": self._acceptance.reach(SHOWN_DEPTHS),
            "tokens_per_step": self._own.mean,
            "others_tokens_per_step": self._others.mean,
        }

    def _learn(self, report: StepReport, seconds: float) -> None:
        priors = self._priors
        waited = report.waited_us * 1e-6
        priors.step.observe(max(0.0, seconds - waited))
        if report.first_us:
            priors.first.observe(report.first_us * 1e-6)
        if report.level_us:
            priors.level.observe(report.level_us * 1e-6)
        if report.verified:
            self._acceptance.observe(report)
            priors.observe(report)
            drafting = priors.first.mean + (report.verified_depth - 1) * priors.level.mean
            priors.hidden.observe(max(0.0, drafting - waited) if waited else seconds)  # no hold: all hidden
        self._own.observe(1 + report.accepted)
        self._others.observe(max(0, report.sessions - 1) * (1 + report.accepted))

    def _wanted(self) -> int:
        """Return the depth to plan: the best depth below the last commit, plus the tokens that are committed while a
        level is under way.

        Where no wait pays, drafters can only draft ahead of the steps, and the depth is the ceiling.
        """
        priors, others = self._priors, self._others.mean
        inputs = GoodputInputs(priors.step.mean, priors.first.mean, priors.level.mean, priors.hidden.mean, others)
        best = best_depth(self._acceptance.reach(self._ceilings.depth), inputs, GOODPUT.slack)
        behind = priors.first.mean * self._own.mean / priors.step.mean if priors.step.mean else 0.0
        return min(self._ceilings.depth, best + round(behind)) if best else self._ceilings.depth

    def _plan_with(self, depth: int) -> Plan:
        width = min(self._ceilings.width, self._acceptance.width(GOODPUT.width_share))
        return replace(self._ceilings, version=self._plan.version + 1, depth=depth, width=width)
