"""The goodput policy: as deep as brings the most tokens a second, and not at all where that does not pay.

Source: the goodput of TurboSpec (arXiv 2406.14066), see `outrider.core.forecast`. It knows no clock but the verifier's
reports, so a simulation runs the very same code.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outrider.core.acceptance import Acceptance, Counts
from outrider.core.contract import Plan, StepReport
from outrider.core.forecast import Circumstances, best_depth

FOLLOWING = 0.1  # how far an average follows one step
DWELL_S = 1.0  # the least time between two plans
SLACK = 0.1  # by how much it may be slower than the best, for it is a ceiling
PROOF = 12  # steps of a plan, before it is judged
USELESS_S = 3.0  # for so long the verifier has drafters rest, before they are let go
AWAY_S = (10.0, 80.0)  # without speculation, before it is tried again: the first time and at the most
WIDTH_SHARE = 0.98  # of what was committed, which a plan's width is to hold
KNOWN = 64  # steps of other sessions, from which on a new one begins as they would


class Average:
    """A moving average, and how far what it follows is from it."""

    def __init__(self) -> None:
        self._count = 0
        self.mean = 0.0  # 0 before the first
        self.spread = 0.0

    @property
    def known(self) -> bool:
        """Whether there is one."""
        return self._count > 0

    def observe(self, value: float) -> None:
        """Takes another value."""
        self._count += 1
        weight = max(FOLLOWING, 1 / self._count)
        self.spread += weight * (abs(value - self.mean) - self.spread) if self._count > 1 else 0.0
        self.mean += weight * (value - self.mean)


@dataclass(slots=True)
class Lessons:
    """What the sessions of one target, its drafters and one kind of traffic have in common. Times in seconds."""

    counts: Counts = field(default_factory=Counts)
    fresh: Counts = field(default_factory=Counts)  # of these, what others have not been told yet
    first: Average = field(default_factory=Average)  # from a commit to the first level
    level: Average = field(default_factory=Average)  # for each level more
    step: Average = field(default_factory=Average)  # from commit to commit, but for holds
    hidden: Average = field(default_factory=Average)  # of drafting, that holds no step back
    useless: bool = False  # the verifier has drafters rest
    quiet: float = 0.0  # seconds of steps since then, or since the last trial, over all sessions
    away: float = AWAY_S[0]  # how long until the next trial

    def observe(self, report: StepReport) -> None:
        """Takes a step that verified something."""
        self.counts.observe(report)
        self.fresh.observe(report)

    def times(self) -> dict[str, Average]:
        """The averages by their names."""
        return {"first": self.first, "level": self.level, "step": self.step, "hidden": self.hidden}


class Goodput:
    """Maximises the expected tokens a second of the sessions that share a verifier's steps.

    Within a plan the verifier decides step by step what is worth its rows and its waits. Where it has the drafters rest
    because steps are faster without, the session lets them go, for others to use, and tries them again later.
    """

    def __init__(self, ceilings: Plan, lessons: Lessons | None = None) -> None:
        """`lessons` are shared and added to."""
        self._ceilings = ceilings
        self._lessons = lessons or Lessons()
        self._acceptance = Acceptance(self._lessons.counts)
        self._own = Average()  # tokens that a step commits for this session
        self._others = Average()  # and for the others in it
        self._seconds = 0.0  # since the plan changed
        self._steps = 0  # likewise
        self._resting = 0.0  # seconds for which drafters have rested
        self._plan = replace(ceilings, version=1)
        if self._lessons.useless:
            self._plan = self._with(0)
        elif self._lessons.counts.steps >= KNOWN:
            self._plan = self._with(self._wanted())

    def observe(self, report: StepReport) -> None:
        """Takes one step's figures."""
        if not report.elapsed_us:
            return  # the first token's time is the prompt's
        seconds = report.elapsed_us * 1e-6
        self._seconds += seconds
        self._steps += 1
        self._learn(report, seconds)
        if not self._plan.depth:
            self._rest(seconds)
            return
        self._resting = self._resting + seconds if report.resting else 0.0
        if self._seconds < DWELL_S or self._steps < PROOF:
            return
        if self._resting >= USELESS_S:
            self._lessons.useless, self._lessons.quiet = True, 0.0
            self._change(0)
            return
        if self._seconds >= USELESS_S and not self._resting:
            self._lessons.useless, self._lessons.away = False, AWAY_S[0]
        wanted = self._wanted()
        if abs(wanted - self._plan.depth) >= max(2, self._plan.depth // 3):
            self._change(wanted)

    def plan(self) -> Plan:
        """The ceilings, with the present depth."""
        return self._plan

    def _rest(self, seconds: float) -> None:
        """Without drafters until it pays again. One session at a time tries whether it does."""
        it = self._lessons
        it.quiet += seconds
        if it.useless and it.quiet < it.away:
            return
        if it.useless:
            it.quiet, it.away = 0.0, min(2 * it.away, AWAY_S[1])
        elif self._seconds < DWELL_S:
            return
        self._change(self._wanted())

    def _learn(self, report: StepReport, seconds: float) -> None:
        lessons = self._lessons
        waited = report.waited_us * 1e-6
        lessons.step.observe(max(0.0, seconds - waited))
        if report.first_us:
            lessons.first.observe(report.first_us * 1e-6)
        if report.level_us:
            lessons.level.observe(report.level_us * 1e-6)
        if report.verified:
            self._acceptance.observe(report)
            lessons.observe(report)
            drafting = lessons.first.mean + (report.verified_depth - 1) * lessons.level.mean
            lessons.hidden.observe(max(0.0, drafting - waited) if waited else seconds)  # no hold: it had all the time
        self._own.observe(1 + report.accepted)
        self._others.observe(max(0, report.sessions - 1) * (1 + report.accepted))

    def _wanted(self) -> int:
        """As deep as is best from the last commit on, and as far again as commits come while a level is on its way.

        Where no wait pays, drafters can only be ahead of the steps: as far as they may.
        """
        best, it = best_depth(self._reach(), self._here(), SLACK), self._lessons
        behind = it.first.mean * self._own.mean / it.step.mean if it.step.mean else 0.0
        return min(self._ceilings.depth, best + round(behind)) if best else self._ceilings.depth

    def _reach(self) -> list[float]:
        return self._acceptance.reach(self._ceilings.depth)

    def _here(self) -> Circumstances:
        it = self._lessons
        return Circumstances(it.step.mean, it.first.mean, it.level.mean, it.hidden.mean, self._others.mean)

    def _change(self, depth: int) -> None:
        self._seconds, self._steps, self._resting = 0.0, 0, 0.0
        self._plan = self._with(depth)

    def _with(self, depth: int) -> Plan:
        top, lessons, version = self._ceilings, self._lessons, self._plan.version + 1
        if not depth:
            return replace(top, version=version, depth=0, width=0, nodes=0, wait_us=0)
        width = min(top.width, self._acceptance.width(WIDTH_SHARE))
        longest = 2 * lessons.first.mean + depth * lessons.level.mean + 4 * lessons.first.spread
        wait_us = min(top.wait_us, int(longest * 1e6)) if lessons.first.mean else top.wait_us
        return replace(top, version=version, depth=depth, width=width, wait_us=wait_us)
