"""Selection of the overlap mode: how drafters work beside a verifier's steps, by measured speed.

See docs/drafters.md, "How drafters work". Times are in seconds, speeds in tokens per second.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import Enum
from typing import Any, Generic, Self, TypeVar

from outrider.core.stats import FadingRatio

ChoiceT = TypeVar("ChoiceT", bound=Hashable)

MEMORY = 0.95  # weight of the past at each step


class Speed(FadingRatio):
    """Tokens per second, or other work per second, over some tens of the latest steps."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        super().__init__(MEMORY)
        self.steps = 0

    def observe(self, done: float, seconds: float = 1.0) -> None:
        """Record a step that did `done` units of work, `seconds` after the step before."""
        self.steps += 1
        super().observe(done, seconds)

    @property
    def per_second(self) -> float:
        """Work per second; 0 before the first step."""
        return self.ratio


class OverlapMode(Enum):
    """How drafters work beside a verifier's steps."""

    TURNS = "turns"  # a step may be held back for drafters, and drafters do not draft while it runs
    AHEAD = "ahead"  # drafters draft while steps run
    REST = "rest"  # drafters do not draft


class ArmSelector(Generic[ChoiceT]):
    """A bandit: measures the speed of steps under each of several arms. The fastest arm is kept; the others are tried
    again for a small share of the time."""

    PROOF = (8, 24)  # steps of a trial that count: at least, and at most
    CLEAR = 1.3  # ratio of two arms' speeds from which the smaller number of steps suffices
    ENOUGH = 400  # work since the change, for example tokens, from which the smaller number of steps suffices
    SETTLING = 4  # steps after a change that do not count
    LOSS = 0.01  # share of the time that trials of one arm may cost
    APART = 5.0  # time between two trials of an arm at least, in multiples of a trial's duration

    def __init__(self, arms: Iterable[ChoiceT], first: ChoiceT) -> None:
        self.arm = first  # the arm to use now
        self._kept = first
        self._speeds = {arm: Speed() for arm in arms}
        self._due = dict.fromkeys(self._speeds, 0.0)  # seconds until an arm is tried again
        self._settling = self.SETTLING
        self._begin()

    def observe(self, done: float, seconds: float) -> None:
        """Record a step that did `done` units of work, `seconds` after the step before. May change the arm."""
        self._done += done
        self._seconds += seconds
        self._steps += 1
        if self._steps > self._settling:
            self._speeds[self.arm].observe(done, seconds)
        for arm in self._due:
            self._due[arm] -= seconds
        proof = self._steps - self._settling
        if proof >= self.PROOF[1] or (proof >= self.PROOF[0] and (self._clear or self._done >= self.ENOUGH)):
            self._select_arm()

    def estimates(self) -> dict[str, Any]:
        """Return the arm in use, and for each arm its measured speed and when it is tried again."""
        return {
            "arm": self.name(self.arm),
            "arms": {
                self.name(arm): {
                    "per_s": speed.per_second,
                    "steps": speed.steps,
                    "trial_in_s": max(0.0, self._due[arm]),
                }
                for arm, speed in tuple(self._speeds.items())
            },
        }

    def name(self, arm: ChoiceT) -> str:
        """Return an arm's name for people."""
        return str(arm.value if isinstance(arm, Enum) else arm)

    @property
    def _clear(self) -> bool:
        speeds = sorted(self._speeds[arm].per_second for arm in (self.arm, self._kept))
        return speeds[1] > self.CLEAR * speeds[0]

    def _select_arm(self) -> None:
        if self.arm == self._kept:
            due = [arm for arm in self._due if arm != self.arm and self._due[arm] <= 0.0]
            if due:
                self._speeds[due[0]] = Speed()
                self._follow(due[0])
            return
        loser, winner = sorted((self.arm, self._kept), key=lambda arm: self._speeds[arm].per_second)
        usual = self._speeds[self._kept].per_second
        lost = self._seconds - self._done / usual if usual else 0.0
        self._due[loser] = max(lost / self.LOSS, self.APART * self._seconds)
        self._kept = winner
        self._follow(winner)

    def _follow(self, arm: ChoiceT) -> None:
        if arm != self.arm:
            self._settling = self.settling_after(self.arm)
            self.arm = arm
        self._begin()

    def settling_after(self, previous: ChoiceT) -> int:
        """Return the number of steps that do not count after a change from the arm `previous`."""
        return self.SETTLING

    def _begin(self) -> None:
        self._steps, self._done, self._seconds = 0, 0.0, 0.0  # since the last change


class OverlapSelector(ArmSelector[OverlapMode]):
    """Selects the overlap mode."""

    STARTING = 12  # steps that do not count after drafters rested, because they first read the tokens that they missed

    def __init__(self, mode: OverlapMode) -> None:
        super().__init__(OverlapMode, mode)

    @property
    def rates(self) -> tuple[float, float]:
        """Work per second while drafters rest, and in the faster of the modes in which they draft.

        Both are 0 where resting was not measured as fastest, or has become slower since. In the latter case the other
        modes are tried again when they are due.
        """
        if self._kept is not OverlapMode.REST:
            return 0.0, 0.0
        resting = self._speeds[OverlapMode.REST].per_second
        working = max(speed.per_second for mode, speed in self._speeds.items() if mode is not OverlapMode.REST)
        return (resting, working) if resting >= working else (0.0, 0.0)

    def warm_started(self) -> Self:
        """Return a selector for another number of sessions that starts with this one's arm and times of trials."""
        selector = type(self)(self._kept)
        selector._due = dict(self._due)
        return selector

    def settling_after(self, previous: OverlapMode) -> int:
        """Return the number of steps that do not count after a change from the mode `previous`."""
        return self.STARTING if previous is OverlapMode.REST else self.SETTLING
