"""Decides how long to delay a step for more draft nodes: while expected extra tokens outweigh the delay.

All times are in seconds. An expected value is the number of tokens that a step over the tree is expected to commit. See
docs/control.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.control.trials import TrialSchedule
from outrider.core.stats import Ema


@dataclass(frozen=True, slots=True)
class HoldTuning:
    """How long a step waits for deltas."""

    weight: float = 0.15  # of one delta in an average
    least_patience: float = 1.25  # of a delta's mean delay: how long a step waits for it at least
    retry_steps: tuple[int, int] = (2, 64)  # steps without a wait before one is tried: at first, and at most


HOLDS = HoldTuning()


class ArrivalPattern:
    """Moving averages of the delay and the gain of the k-th delta after a commit."""

    DEPTH = 16

    def __init__(self) -> None:
        self._delays: list[Ema] = []  # seconds since the delta before; of the first, since the commit was sent
        self._deviations: list[Ema] = []  # of the delays from their means
        self._gains: list[Ema] = []  # expected tokens

    @property
    def known(self) -> int:
        """Deltas after a commit of which something is known."""
        return len(self._delays)

    def estimates(self) -> list[dict[str, float]]:
        """Return what is estimated of each delta after a commit."""
        pairs = zip(tuple(self._delays), tuple(self._gains), strict=False)
        return [{"delay_s": delay.mean, "gain_tokens": gain.mean} for delay, gain in pairs]

    def learn(self, index: int, delay: float, gain: float) -> None:
        if index == len(self._delays) and index < self.DEPTH:
            self._delays.append(Ema(HOLDS.weight, warm_up=True))
            self._deviations.append(Ema(HOLDS.weight, warm_up=True))
            self._gains.append(Ema(HOLDS.weight, warm_up=True))
        if index < len(self._delays):
            known = self._delays[index].mean or 0.75 * delay  # at first the delay may be a quarter wrong
            self._deviations[index].observe(abs(delay - known))
            self._delays[index].observe(delay)
            self._gains[index].observe(gain)

    def end(self, index: int, delay: float) -> None:
        """Record that delta `index` did not arrive within `delay` seconds, hence no later one either."""
        self.learn(index, delay, 0.0)
        for later in range(index + 1, len(self._gains)):
            self.learn(later, self._delays[later].mean, 0.0)

    def patience(self, index: int) -> float:
        """Return the seconds after which delta `index` is late; 0 if nothing is known.

        As the retransmission timeout of TCP (RFC 6298): the mean and four mean deviations; at most twice the mean.
        """
        if not self.known:
            return 0.0
        place = min(index, self.known - 1)
        delay = self._delays[place].mean
        return min(2.0 * delay, max(HOLDS.least_patience * delay, delay + 4.0 * self._deviations[place].mean))

    def forecast(self, index: int) -> tuple[float, float]:
        """Return the expected delay in seconds and the gain in tokens of delta `index`.

        A delta that no step has waited for yet is expected to have half the gain of the last known one.
        """
        if index < self.known:
            return self._delays[index].mean, self._gains[index].mean
        return self._delays[-1].mean, self._gains[-1].mean / 2


class ArrivalPatterns:
    """Arrival patterns that the sessions of a verifier share, so that a new session starts with known patterns; and
    when a step is held back to see whether that pays again.

    Deltas after a commit that keeps a part of the tree follow another pattern than deltas after one that keeps nothing;
    and the first deltas of a drafter that begins with a session, or again after a rest, yet another: it reads first.
    """

    def __init__(self) -> None:
        self.fresh, self.kept, self.starting = (ArrivalPattern() for _ in range(3))
        self._trials = TrialSchedule(HOLDS.retry_steps)
        self._trials.fail(0)
        self._steps = 0  # of all sessions
        self._at = 0.0  # when the last one ended

    def step(self, now: float) -> None:
        """Count a step that ended at `now`. Several sessions of one step count once."""
        if now != self._at:
            self._steps += 1
            self._at = now

    @property
    def trial_in_steps(self) -> int:
        """Steps without a wait until the next trial."""
        return max(0, round(self._trials.due) - self._steps)

    def wait(self, *, trial: bool) -> None:
        """Record that a wait begins: as a trial, or because waiting pays."""
        if not trial:
            self._trials.forgive(self._steps)
        self._trials.fail(self._steps)

    def after(self, expected: float) -> ArrivalPattern:
        """Return the pattern of deltas after a commit that leaves a tree of `expected` tokens."""
        return self.kept if expected > 1.0 else self.fresh

    def estimates(self) -> dict[str, Any]:
        """Return what is estimated of deltas after commits that keep nothing of the tree, and a part of it, and of the
        first ones of drafters that begin."""
        return {
            "fresh": self.fresh.estimates(),
            "kept": self.kept.estimates(),
            "starting": self.starting.estimates(),
            "trial_in_steps": self.trial_in_steps,
        }


class Arrivals:
    """Predicts when one session's deltas arrive and how many expected tokens they add, from earlier commits.

    The delay of a delta that arrives while a pass runs is not learned, because on a shared machine the pass slows the
    drafter. To measure a drafter that no step waits for, a wait of half a step is tried from time to time; where
    nothing is known, one of a step. Of a drafter that begins, the time to its first delta is always learned.
    """

    def __init__(self, patterns: ArrivalPatterns) -> None:
        self._patterns = patterns
        self._pattern = patterns.fresh
        self._count = 0  # deltas since the last commit
        self._last = 0.0  # time at which the latest delta arrived, or the commit was sent
        self._expected = 0.0
        self.starting = True  # whether no delta has come since the drafter began
        self._started = False  # whether a commit has been sent since then
        self._quiet = False  # whether nothing has disturbed the drafter since the commit
        self._waited = False  # whether a step waits for the next delta
        self._began = 0.0  # time at which the commit was sent
        self._first = 0.0  # seconds from the commit to the first undisturbed delta, and to the last one
        self._latest = 0.0
        self._undisturbed = 0  # undisturbed deltas after the first

    def start(self) -> None:
        """Record that a drafter begins with the session: it reads the text before its first delta."""
        self.starting, self._started, self._quiet = True, False, False

    def restart(self, now: float, expected: float, *, resting: bool = False) -> None:
        """Record that a commit was sent at `now`, and whether it has drafters rest. A step over the remaining tree
        would commit `expected` tokens."""
        self.give_up(now)
        if self.starting and self._started and now - self._last > self._patterns.starting.patience(0):
            self._give_up_start(now)
        if not (self.starting and self._started):
            self._last = now
        self.starting, self._started = self.starting or resting, not resting
        self._pattern = self._patterns.after(expected)
        self._patterns.step(now)
        self._count = 0
        self._expected = expected
        self._quiet = not self.starting
        self._began, self._first, self._latest = now, 0.0, 0.0
        self._undisturbed = 0

    def give_up(self, now: float) -> None:
        """Record that a step that waited for the next delta no longer does, if one did."""
        if self._waited and self._quiet:
            self._pattern.end(self._count, now - self._last)
        self._waited = False

    def _give_up_start(self, now: float) -> None:
        """Treat a drafter that is late as any other: it may be too slow to send anything before the next commit."""
        starting, self.starting = self._patterns.starting, False
        if starting.known:
            starting.learn(0, now - self._last, starting.forecast(0)[1])

    def arrived(self, now: float, expected: float, *, passing: bool) -> None:
        """Record that a delta arrived at `now`, during a pass or not. A step over the tree would now commit `expected`
        tokens."""
        if self.starting and self._started:
            self._patterns.starting.learn(0, now - self._last, max(0.0, expected - self._expected))
        self._quiet = self._quiet and not passing
        if self._quiet:
            self._pattern.learn(self._count, now - self._last, max(0.0, expected - self._expected))
            self._latest = now - self._began
            self._first = self._first or self._latest
            self._undisturbed = self._count
        self._last, self._expected = now, expected
        self.starting = self._waited = False
        self._count += 1

    def grew(self, expected: float) -> None:
        """Record that the tree grew without a delta. A step over it would now commit `expected` tokens."""
        self._expected = expected

    @property
    def due(self) -> bool:
        """Whether a trial wait is due or runs: at once where nothing is known of such deltas."""
        return self._count == 0 and (self._waited or not self.learned or not self._patterns.trial_in_steps)

    def later(self, now: float, seconds: float, rate: float) -> bool:
        """Return whether to run a step of `seconds` first and wait for the starting drafter afterwards. A second is
        worth `rate` tokens.

        It begins with the next commit, if none has been sent since it was wanted. If it reads, it goes on during the
        step: a wait before the step saves only what would be left of it when the delta comes, and that must be worth
        the step's token.
        """
        if not self.starting:
            return False
        if not self._started or not self.learned:
            return not self._started
        left = self.forecast(0)[0] - self.passed(now)
        return rate * (seconds - max(0.0, left)) < 1.0

    @property
    def times(self) -> tuple[float, float]:
        """Seconds from the commit to the first delta, and on average between two deltas; 0 where not measured."""
        between = (self._latest - self._first) / self._undisturbed if self._undisturbed else 0.0
        return self._first, between

    def forecast(self, deltas: int) -> tuple[float, float]:
        """Return the time until the next `deltas` + 1 deltas have arrived, in seconds since the last delta, and their
        gain in expected tokens."""
        first = self._count
        if not self.learned or first >= ArrivalPattern.DEPTH:
            return 0.0, 0.0
        coming = [self._patterns.starting.forecast(0)] if self.starting else []
        coming += [self._pattern.forecast(index) for index in range(first + len(coming), first + deltas + 1)]
        return sum(delay for delay, _ in coming), sum(gain for _, gain in coming)

    def patience(self, seconds: float) -> float:
        """Return how long to wait for the next delta, in seconds since the last one or the commit; those of a step,
        `seconds`, where no such delta has come yet."""
        if self._count >= ArrivalPattern.DEPTH:
            return seconds
        pattern = self._patterns.starting if self.starting else self._pattern
        return pattern.patience(self._count) or seconds

    def passed(self, now: float) -> float:
        """Return the seconds since the last delta arrived or, without one, since the commit was sent."""
        return now - self._last

    @property
    def begun(self) -> bool:
        """Whether a delta has arrived since the last commit."""
        return self._count > 0

    @property
    def learned(self) -> int:
        """The number of deltas after a commit for which there are averages; 0 where the first delay is unknown."""
        return self._pattern.known if not self.starting or self._patterns.starting.known else 0

    def wait(self, *, trial: bool) -> None:
        """Record that a step waits for the next delta: as a trial, or because waiting pays."""
        if not trial or not self._patterns.trial_in_steps:
            self._patterns.wait(trial=trial)
        self._waited = True


def pays(group: Sequence[Arrivals], now: float, rate: float) -> bool:
    """Return whether waiting for some number of further deltas of these sessions brings more than `rate`, in tokens per
    second, for the time that it takes."""
    for deltas in range(max((max(1, each.learned) for each in group), default=0)):
        coming = [(*each.forecast(deltas), each.passed(now)) for each in group]
        gain = sum(gain for _, gain, _ in coming)
        delay = max(
            delay - min(passed, each.forecast(0)[0]) for each, (delay, _, passed) in zip(group, coming, strict=True)
        )
        if gain > rate * delay:
            return True
    return False


def hold_seconds(group: Sequence[Arrivals], now: float, seconds: float, rate: float) -> float:
    """Return how many seconds longer to wait for the next delta of any of these sessions; 0 starts the step.

    `seconds`: the duration of the step without a further wait; `rate`: tokens that a second is worth. Drafters
    themselves stop when a level is not worth its time, so a step waits for levels that they have begun.
    """
    paying = pays(group, now, rate)
    if coming := [each for each in group if paying or each.begun]:
        holds = [each.patience(seconds) - each.passed(now) for each in coming]
    elif any(each.due for each in group):
        holds = [(seconds / 2 if each.learned else seconds) - each.passed(now) for each in group]
    else:
        return 0.0
    for each in group:
        each.wait(trial=not paying)
    return max(0.0, *holds)
