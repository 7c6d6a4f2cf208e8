"""Decides how a verifier and its drafters work together: in which overlap mode, and for which share of the sessions.

One objective, tokens per second of the verifier; one measure, the seconds that plain decoding would have taken for what
a step did; one bound, the delay budget. See docs/control.md. Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.core.control.arms.arm import MODES, PLAIN, Arm, OverlapMode, StepOutcome, VerifierLoad
from outrider.core.control.arms.delay_budget import DelayBudget
from outrider.core.control.arms.load_governor import GOVERNOR, LoadGovernor
from outrider.core.control.cost.plain_pace import PlainPace, StepWork
from outrider.core.stats import FadingRatio

ONE = StepWork(sessions=1, read=0, tokens=1.0)  # a plain step of a single session


class Governor:
    """Chooses the arm for each step of a verifier."""

    def __init__(
        self,
        pace: PlainPace,
        budget: DelayBudget | None = None,
        pinned: Arm | None = None,
        modes: Sequence[OverlapMode] = MODES,
    ) -> None:
        """`pinned`: the only arm, whatever it costs. `modes`: those in which drafters may draft."""
        self.pace = pace
        self.budget = budget or DelayBudget()
        self.arm = PLAIN if pinned is None else pinned  # in force for the next step
        self.limited = False  # the delay budget was empty, and has not recovered: plain decoding only
        self.switches = 0  # changes of the usual arm
        self._pinned = pinned
        self._modes = modes
        self._loads: dict[VerifierLoad, LoadGovernor] = {}
        self._present: LoadGovernor | None = None
        self._settling = 0  # steps until blocks count again
        self._changing = 0  # steps until they count although the drafts are not those of the arm yet
        self._lingering = 0  # steps after which drafters are assumed to have stopped
        self._luck: dict[Arm, FadingRatio] = {}  # committed tokens, of those that were expected

    def begin(self, load: VerifierLoad) -> None:
        """Choose the arm for the first step of a verifier that was idle."""
        self._follow(self._governor_of(load))

    def observe(self, load: VerifierLoad, step: StepOutcome) -> None:
        """Record a step under the arm in force, and choose the arm of the next one."""
        governor, arm = self._governor_of(load), self.arm
        if governor is not self._present:
            self._follow(governor)
        settled = not self._settling and not self._changing
        self._settling = max(0, self._settling - 1)
        changed = (step.expected > step.work.sessions) is (arm != PLAIN)
        self._changing = 0 if changed else max(0, self._changing - 1)
        self._lingering = GOVERNOR.settling if arm != PLAIN and step.drafting else max(0, self._lingering - 1)
        plain = not self._lingering
        work = self._lucky(arm, step)
        self.budget.follow(self.pace.seconds(ONE))
        self.budget.spend(step.seconds, 0.0 if plain else step.seconds - self.pace.least_seconds(work))
        self.pace.observe(step.work, step.seconds, plain=plain and settled)
        if self._pinned is None:
            recovered = governor.recovery.recovered(self.budget)
            self.limited = self.budget.empty or (self.limited and not recovered)
        if not step.eligible:
            return
        usual = governor.usual
        governor.open()
        plain_seconds = self.pace.seconds(work)
        governor.record(PLAIN if plain else arm, plain_seconds, step.seconds)
        if self._pinned is not None:
            return
        if self.limited:
            governor.limit(self.budget, plain=plain)
        else:
            governor.resume()
            governor.observe(arm, step, plain_seconds, settled=settled)
        self.switches += governor.usual != usual
        self._follow(governor)

    def pass_over(self, load: VerifierLoad) -> None:
        """Take account of a step that cannot be measured, because the verifier had nothing to do before it."""
        governor = self._governor_of(load)
        governor.open()
        self._follow(governor)

    def _lucky(self, arm: Arm, step: StepOutcome) -> StepWork:
        """Return the work of a step, with the tokens that it was expected to commit instead of those that it did.

        What a step commits is random, and would hide what an arm is worth. The expectation, that of the tree's
        calibrated scores, is corrected by how much steps under the arm have committed in relation to it.
        """
        prior = GOVERNOR.luck_prior
        luck = self._luck.setdefault(arm, FadingRatio(hits=prior, attempts=prior))
        luck.observe(step.work.tokens, step.expected)
        return step.work._replace(tokens=step.expected * luck.ratio)

    def reconsider(self) -> None:
        """Try soon what has lost before, because there are other drafters now."""
        for governor in self._loads.values():
            governor.reconsider()

    def rates(self, sessions: int) -> tuple[float, float]:
        """Return the tokens per second of `sessions` sessions, plain and in the best arm that was measured to be
        slower; 0 for the second where none was, and for both where no arm that drafts has been in force."""
        if self._present is None or not self._present.drafted:
            return 0.0, 0.0
        plain = self.pace.tokens_per_s(sessions)
        return plain, plain * (self._present.beaten_speedup or 0.0)

    @property
    def reason(self) -> str:
        """Why the arm is in force, for people."""
        if self._present is None:
            return "no step was taken yet"
        if self._pinned is not None:
            return "the configuration has pinned it"
        if self.limited:
            return f"the delay budget is empty: {max(0.0, self.budget.left_s) * 1e3:.0f} ms are back"
        return self._present.reason

    def compared(self) -> list[tuple[Arm, Arm, dict[str, float | None]]]:
        """Return what was compared under the present load: the usual arm of then, the other one, and by how much that
        was faster (`PairedDifference.estimates`)."""
        judged = () if self._present is None else self._present.judged()
        return [(usual, arm, difference.estimates()) for usual, arm, difference, _ in judged]

    def estimates(self) -> dict[str, Any]:
        """Return the arm in force, the delay that is left, and what is known of all arms."""
        return {
            "arm": str(self.arm),
            "reason": self.reason,
            "delay_budget_s": self.budget.left_s,
            "limited": self.limited,
            "switches": self.switches,
            "plain": self.pace.estimates(),
            "loads": [governor.estimates() for governor in tuple(self._loads.values())],
        }

    def _follow(self, governor: LoadGovernor) -> None:
        arm, changed = self._pinned or governor.arm, governor is not self._present
        if changed and self._present is not None:
            self._present.pause()
        if changed or arm != self.arm:
            self._settling = GOVERNOR.settling
            self._changing = 0 if (self.arm == PLAIN) is (arm == PLAIN) else GOVERNOR.changing
        self._present, self.arm = governor, arm

    def _governor_of(self, load: VerifierLoad) -> LoadGovernor:
        """Return the governor of a load. A new one tries first what is usual for the nearest number of sessions."""
        if load not in self._loads:
            alike = [known for known in self._loads if known.representative >= load.representative]
            nearest = min(
                alike, key=lambda known: (known.greedy != load.greedy, abs(known.size - load.size)), default=None
            )
            hint = PLAIN if nearest is None else self._loads[nearest].usual
            self._loads[load] = LoadGovernor(load, hint, self._modes)
        return self._loads[load]
