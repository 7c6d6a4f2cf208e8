"""How long a verifier holds a step back for a better tree: while that raises goodput, expected tokens over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Pattern:
    """What the k-th delta after a commit brings, learned as a moving average."""

    DEPTH = 16

    def __init__(self) -> None:
        self.delays: list[float] = []  # seconds since the delta before (the first: since the commit was sent)
        self.gains: list[float] = []  # in expected tokens
        self._lessons: list[int] = []

    def learn(self, index: int, delay: float, gain: float) -> None:
        if index == len(self.delays) and index < self.DEPTH:
            self.delays.append(0.0)
            self.gains.append(0.0)
            self._lessons.append(0)
        if index < len(self.delays):
            self._lessons[index] += 1
            weight = max(0.15, 1 / self._lessons[index])
            self.delays[index] += weight * (delay - self.delays[index])
            self.gains[index] += weight * (gain - self.gains[index])

    def end(self, index: int, delay: float) -> None:
        """No delta came within `delay` where this one could have, hence none after it either."""
        self.learn(index, delay, 0.0)
        for later in range(index + 1, len(self.gains)):
            self.learn(later, self.delays[later], 0.0)

    def forecast(self, index: int) -> tuple[float, float]:
        """Delay and gain. A delta that was never waited for is believed to bring half of the one before."""
        if index < len(self.delays):
            return self.delays[index], self.gains[index]
        return self.delays[-1], self.gains[-1] / 2


class Trials:
    """When to try a wait again that did not pay: ever more seldom while it brings nothing."""

    FIRST, LAST = 2, 64  # steps without a wait, before one is tried

    def __init__(self) -> None:
        self._interval = self.FIRST
        self._unwaited = 0
        self._at = 0.0

    def step(self, now: float) -> None:
        """A step ended, for whichever sessions."""
        if now != self._at:
            self._unwaited += 1
            self._at = now

    @property
    def due(self) -> bool:
        """Whether it is time."""
        return self._unwaited >= self._interval

    def wait(self, *, trial: bool) -> None:
        """A wait begins: because that pays, or to try it."""
        self._interval = min(self.LAST, 2 * self._interval) if trial else self.FIRST
        self._unwaited = 0


class Patterns(NamedTuple):
    """What deltas bring, shared by the sessions of a verifier so that a new one need not learn it anew.

    A commit that leaves a part of the tree is followed by other deltas than one that leaves nothing.
    """

    fresh: Pattern
    kept: Pattern
    trials: Trials

    @classmethod
    def unknown(cls) -> Patterns:
        """Nothing is known yet."""
        return cls(Pattern(), Pattern(), Trials())


class Arrivals:
    """What one session's deltas bring, and when, by what came after earlier commits.

    A delta that comes while a pass runs teaches nothing of its delay: on one machine the pass slows the drafter. So
    that a drafter that is not waited for can show what it is worth, a wait of half a step is tried now and then.
    """

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns
        self._pattern = patterns.fresh
        self._count = 0  # deltas since the last commit
        self._last = 0.0  # when the latest of them came, or the commit went out
        self._expected = 0.0
        self._quiet = False  # whether nothing disturbed the drafter since the commit
        self._waited = False  # whether the next delta was waited for
        self._began = 0.0  # when the commit went out
        self._first = 0.0  # seconds until the first delta had come, and until the last, where nothing disturbed them
        self._latest = 0.0
        self._undisturbed = 0  # deltas after the first that nothing disturbed

    def disturb(self) -> None:
        """Until the next commit, delays tell nothing: a drafter has just begun, and reads the prompt."""
        self._quiet = False

    def restart(self, now: float, expected: float) -> None:
        """A commit went out; the tree that was left is worth `expected` tokens."""
        if self._waited and self._quiet:
            self._pattern.end(self._count, now - self._last)
        self._pattern = self._patterns.kept if expected > 1.0 else self._patterns.fresh
        self._patterns.trials.step(now)
        self._count = 0
        self._last = now
        self._expected = expected
        self._quiet = True
        self._waited = False
        self._began, self._first, self._latest = now, 0.0, 0.0
        self._undisturbed = 0

    def arrived(self, now: float, expected: float, *, passing: bool) -> None:
        """A delta came, while a pass ran or not, and made the tree worth `expected` tokens."""
        self._quiet = self._quiet and not passing
        if self._quiet:
            self._pattern.learn(self._count, now - self._last, max(0.0, expected - self._expected))
            self._latest = now - self._began
            self._first = self._first or self._latest
            self._undisturbed = self._count
        self._last, self._expected = now, expected
        self._waited = False
        self._count += 1

    def grew(self, expected: float) -> None:
        """The tree became worth `expected` tokens, and no delta had done it."""
        self._expected = expected

    @property
    def due(self) -> bool:
        """Whether a trial is, or runs."""
        return self._count == 0 and (self._patterns.trials.due or self._waited)

    @property
    def times(self) -> tuple[float, float]:
        """Seconds from the commit to the first delta, and between two on average; 0 where that could not be seen."""
        between = (self._latest - self._first) / self._undisturbed if self._undisturbed else 0.0
        return self._first, between

    def ahead(self, deltas: int) -> tuple[float, float]:
        """When the next but `deltas` delta is expected, in seconds since the last one came, and the gain until then."""
        pattern, first = self._pattern, self._count
        if not pattern.delays or first >= Pattern.DEPTH:
            return 0.0, 0.0
        coming = [pattern.forecast(index) for index in range(first, first + deltas + 1)]
        return sum(delay for delay, _ in coming), sum(gain for _, gain in coming)

    def passed(self, now: float) -> float:
        """Seconds since the last delta came, or the commit went out."""
        return now - self._last

    @property
    def begun(self) -> bool:
        """Whether a delta came since the last commit."""
        return self._count > 0

    @property
    def learned(self) -> int:
        """How many deltas after a commit something is known of."""
        return len(self._pattern.delays)

    def wait(self, *, trial: bool) -> None:
        """The next delta is waited for: because that pays, or to try it."""
        if not trial or self._patterns.trials.due:
            self._patterns.trials.wait(trial=trial)
        self._waited = True


def pays(group: Sequence[Arrivals], now: float, expected: float, seconds: float) -> bool:
    """Whether waiting for some number of further deltas of these sessions raises expected tokens over time.

    It does if (expected + gains) / (seconds + delays) > expected / seconds, `expected` and `seconds` being those of the
    step over all sessions, with the wait so far.
    """
    for deltas in range(max((max(1, each.learned) for each in group), default=0)):
        coming = [(*each.ahead(deltas), each.passed(now)) for each in group]
        gain = sum(gain for _, gain, _ in coming)
        delay = max(
            delay - min(passed, each.ahead(0)[0]) for each, (delay, _, passed) in zip(group, coming, strict=True)
        )
        if (expected + gain) * seconds > expected * (seconds + delay):
            return True
    return False


def patience(group: Sequence[Arrivals], now: float, expected: float, seconds: float, *, judged: bool = False) -> float:
    """How much longer to wait for the next delta of any of these sessions, in seconds; 0: start the step.

    `judged`: drafters stop by themselves when a level is not worth its time, so what one has begun it may end.
    """
    trial = True
    if pays(group, now, expected, seconds):
        trial = False
        holds = [2 * each.ahead(0)[0] - each.passed(now) for each in group]
    elif judged and any(each.begun for each in group):
        holds = [2 * (each.ahead(0)[0] or seconds / 2) - each.passed(now) for each in group if each.begun]
    elif any(each.due for each in group):
        holds = [seconds / 2 - each.passed(now) for each in group]
    else:
        return 0.0
    for each in group:
        each.wait(trial=trial)
    return max(0.0, *holds)
