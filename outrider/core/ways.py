"""How drafters work beside a verifier's steps: whichever way was measured to be fastest."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from enum import Enum
from typing import Generic, Self, TypeVar

ChoiceT = TypeVar("ChoiceT", bound=Hashable)


class Speed:
    """Tokens a second, or other work, over some tens of the latest steps."""

    MEMORY = 0.95  # weight of the past at each step

    def __init__(self) -> None:
        self.steps = 0
        self._done = self._seconds = 0.0

    def observe(self, done: float, seconds: float) -> None:
        """A step did so much, `seconds` after the one before."""
        self.steps += 1
        self._done = self.MEMORY * self._done + done
        self._seconds = self.MEMORY * self._seconds + seconds

    @property
    def per_second(self) -> float:
        """0 before the first step."""
        return self._done / self._seconds if self._seconds else 0.0


class Way(Enum):
    """How drafters work beside a verifier's steps."""

    TURNS = "turns"  # a step is held back for them, and they are still while it runs
    AHEAD = "ahead"  # they go on while it runs
    REST = "rest"  # they do nothing


class Contest(Generic[ChoiceT]):
    """Times steps under each of several ways. The fastest is kept; the others are tried again, for a small share of the
    time."""

    PROOF = (8, 24)  # steps that count of a trial: at least, and at the most
    CLEAR = 1.3  # times as fast, or
    ENOUGH = 400  # tokens since the change: the least will do
    SETTLING = 4  # steps after a change that do not
    LOSS = 0.01  # share of the time that trials of one way may cost
    APART = 5.0  # and the least time between two, in their own

    def __init__(self, ways: Iterable[ChoiceT], first: ChoiceT) -> None:
        self.way = first  # to be followed now
        self._kept = first
        self._speeds = {way: Speed() for way in ways}
        self._due = dict.fromkeys(self._speeds, 0.0)  # seconds until it is tried again
        self._settling = self.SETTLING
        self._begin()

    def observe(self, done: float, seconds: float) -> None:
        """A step did so much, `seconds` after the one before. May change the way."""
        self._done += done
        self._seconds += seconds
        self._steps += 1
        if self._steps > self._settling:
            self._speeds[self.way].observe(done, seconds)
        for way in self._due:
            self._due[way] -= seconds
        proof = self._steps - self._settling
        if proof >= self.PROOF[1] or (proof >= self.PROOF[0] and (self._clear or self._done >= self.ENOUGH)):
            self._judge()

    @property
    def _clear(self) -> bool:
        speeds = sorted(self._speeds[way].per_second for way in (self.way, self._kept))
        return speeds[1] > self.CLEAR * speeds[0]

    def _judge(self) -> None:
        if self.way == self._kept:
            due = [way for way in self._due if way != self.way and self._due[way] <= 0.0]
            if due:
                self._speeds[due[0]] = Speed()
                self._follow(due[0])
            return
        loser, winner = sorted((self.way, self._kept), key=lambda way: self._speeds[way].per_second)
        usual = self._speeds[self._kept].per_second
        lost = self._seconds - self._done / usual if usual else 0.0
        self._due[loser] = max(lost / self.LOSS, self.APART * self._seconds)
        self._kept = winner
        self._follow(winner)

    def _follow(self, way: ChoiceT) -> None:
        if way != self.way:
            self._settling = self.settling_after(self.way)
            self.way = way
        self._begin()

    def settling_after(self, previous: ChoiceT) -> int:
        """Steps after that way which do not count."""
        return self.SETTLING

    def _begin(self) -> None:
        self._steps, self._done, self._seconds = 0, 0.0, 0.0  # since the last change


class Rivals(Contest[Way]):
    """Between the ways."""

    STARTING = 12  # steps that do not count where drafters rested: they first read what they missed

    def __init__(self, way: Way) -> None:
        super().__init__(Way, way)

    @property
    def rates(self) -> tuple[float, float]:
        """Work a second while drafters rest, and in the faster of the ways in which they work; 0: not measured here, or
        resting is not what was found to be fastest, or it has become slower since: then it is tried again when it is
        due, and until then the figures show nothing."""
        if self._kept is not Way.REST:
            return 0.0, 0.0
        resting = self._speeds[Way.REST].per_second
        working = max(speed.per_second for way, speed in self._speeds.items() if way is not Way.REST)
        return (resting, working) if resting >= working else (0.0, 0.0)

    def inherited(self) -> Self:
        """For other circumstances: the same is kept, and as long until the others are tried."""
        heir = type(self)(self._kept)
        heir._due = dict(self._due)
        return heir

    def settling_after(self, previous: Way) -> int:
        """Steps after that way which do not count."""
        return self.STARTING if previous is Way.REST else self.SETTLING
