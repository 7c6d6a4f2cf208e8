"""The goodput policy: the drafting depth with the most tokens per second, or no drafting where drafting does not pay.

Source: the goodput of TurboSpec (arXiv 2406.14066), see `outrider.core.control.depth.goodput_model` and
docs/decisions/0012-goodput-decides-how-far.md. The policy takes all times from the verifier's reports, so that a
simulation can run the same code.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from outrider.core.control.depth.acceptance_stats import Acceptance, AcceptanceCounts
from outrider.core.control.depth.goodput_model import GoodputInputs, best_depth
from outrider.core.session.contract import Plan, StepReport
from outrider.core.stats import Ema

EMA_WEIGHT = 0.1  # weight of one step in an average
DWELL_S = 1.0  # seconds between two plans at least
SLACK = 0.1  # share by which the chosen depth may be slower than the best one, because the depth is a ceiling
MIN_STEPS = 12  # steps under a plan before the plan may change
WIDTH_SHARE = 0.98  # share of committed nodes that a plan's width must contain
SHOWN_DEPTHS = 8  # depths whose acceptance estimates() returns
MIN_PRIOR_STEPS = 64  # steps of other sessions from which on a new session starts with a depth from their averages


class Average(Ema):
    """A moving average of a value, and of the value's absolute deviation from it."""

    __slots__ = ("spread",)

    def __init__(self) -> None:
        super().__init__(EMA_WEIGHT, warm_up=True)
        self.spread = 0.0

    @property
    def known(self) -> bool:
        """Whether a value was observed."""
        return self.count > 0

    def observe(self, value: float) -> None:
        """Add a value."""
        if self.known:
            self.spread += self.next_weight * (abs(value - self.mean) - self.spread)
        super().observe(value)


@dataclass(slots=True)
class AcceptancePriors:
    """Statistics that sessions with the same target, drafters and kind of traffic share. Times are in seconds."""

    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    # The part of `counts` that was not sent to other routers yet.
    fresh: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    first: Average = field(default_factory=Average)  # from a commit to the first level
    level: Average = field(default_factory=Average)  # for each further level
    step: Average = field(default_factory=Average)  # from commit to commit, without holds
    hidden: Average = field(default_factory=Average)  # drafting time that does not hold a step back

    def observe(self, report: StepReport) -> None:
        """Add a step that verified at least one node."""
        self.counts.observe(report)
        self.fresh.observe(report)

    def times(self) -> dict[str, Average]:
        """Return the averages by name."""
        return {"first": self.first, "level": self.level, "step": self.step, "hidden": self.hidden}

    def estimates(self) -> dict[str, Any]:
        """Return what is estimated of the target and its drafters."""
        return {
            "steps": self.counts.steps,
            "reach": Acceptance(self.counts).reach(SHOWN_DEPTHS),
            **{f"{name}_s": average.mean for name, average in self.times().items()},
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
        self._own = Average()  # tokens that a step commits for this session
        self._others = Average()  # tokens that a step commits for all other sessions
        self._seconds = 0.0  # since the plan changed
        self._steps = 0  # since the plan changed
        self._plan = replace(ceilings, version=1)
        if self._priors.counts.steps >= MIN_PRIOR_STEPS:
            self._plan = self._plan_with(self._wanted())

    def observe(self, report: StepReport) -> None:
        """Add one step, and change the plan where that pays."""
        if not report.elapsed_us or report.resting:
            return  # the time of the first token is that of the prompt, and a plain step shows nothing of drafters
        seconds = report.elapsed_us * 1e-6
        self._seconds += seconds
        self._steps += 1
        self._learn(report, seconds)
        if self._seconds < DWELL_S or self._steps < MIN_STEPS:
            return
        wanted = self._wanted()
        if abs(wanted - self._plan.depth) >= max(2, self._plan.depth // 2):
            self._change(wanted)

    def plan(self) -> Plan:
        """Return the ceilings with the present depth."""
        return self._plan

    def estimates(self) -> dict[str, Any]:
        """Return what is estimated of the session, beside the priors that it shares."""
        return {
            "depth": self._plan.depth,
            "wanted_depth": self._wanted() if self._priors.step.known else self._plan.depth,
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
        best, priors = best_depth(self._reach(), self._inputs(), SLACK), self._priors
        behind = priors.first.mean * self._own.mean / priors.step.mean if priors.step.mean else 0.0
        return min(self._ceilings.depth, best + round(behind)) if best else self._ceilings.depth

    def _reach(self) -> list[float]:
        return self._acceptance.reach(self._ceilings.depth)

    def _inputs(self) -> GoodputInputs:
        priors = self._priors
        return GoodputInputs(
            priors.step.mean, priors.first.mean, priors.level.mean, priors.hidden.mean, self._others.mean
        )

    def _change(self, depth: int) -> None:
        self._seconds, self._steps = 0.0, 0
        self._plan = self._plan_with(depth)

    def _plan_with(self, depth: int) -> Plan:
        top, priors, version = self._ceilings, self._priors, self._plan.version + 1
        width = min(top.width, self._acceptance.width(WIDTH_SHARE))
        longest = 2 * priors.first.mean + depth * priors.level.mean + 4 * priors.first.spread
        wait_us = min(top.wait_us, int(longest * 1e6)) if priors.first.mean else top.wait_us
        return replace(top, version=version, depth=depth, width=width, wait_us=wait_us)
