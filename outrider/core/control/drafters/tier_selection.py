"""Selection of the drafter tiers that draft for a generation, by measured speed.

A tier pays if one of its passes over a tree takes less time than it saves the tier above (docs/drafters.md, "Tiers").
That depends on machines, models and texts, so it is measured: at first every set of tiers drafts for a moment, and the
fastest ones once more; the winner is kept, and the others have trials. Times are in seconds, speeds in tokens per
second.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from outrider.core.control.trials import pause_after
from outrider.core.stats import QUICK, FadingRatio

Tiers = frozenset[int]


@dataclass(frozen=True, slots=True)
class TierTuning:
    """How sets of tiers are compared."""

    all_sets: int = 3  # up to this many tiers every set is tried; beyond, all tiers, all but one, and single tiers
    heats: int = 2  # rounds at the beginning, in each of which an arm has one window
    finalists: int = 3  # arms of all heats but the first, at most
    heat_s: float = 0.4  # of a window in a heat
    window_s: float = 2.0  # of a window later
    proof: tuple[int, int] = (1, 4)  # windows of a trial: at least, and at most
    clear: float = 1.3  # ratio of two arms' speeds from which the smaller number of windows suffices


TIERS = TierTuning()


class TierSelector:
    """A bandit: measures the speed of a generation under each of several sets of tiers, its arms. The fastest is kept;
    the others are tried again for a small share of the time. An observation is a time window, not a step.

    It begins with heats: each arm has a window, and each that was not clearly slower than the fastest has another one,
    until one is left, or two heats are over. So three tiers, seven sets, are settled after ten short windows; earlier
    where an arm uses up the verifier's delay budget, and some other is known to pay. Trials are not in blocks A B B A
    (`PairedTrial`), because drafters that begin read the text first: each change of the arm costs a part of a window.
    """

    def __init__(self, arms: Iterable[Tiers]) -> None:
        """`arms`: in the order of the first heat."""
        self._speeds = {arm: FadingRatio(QUICK) for arm in arms}
        self._due = dict.fromkeys(self._speeds, 0.0)  # seconds until an arm is tried again
        self._seen: Counter[Tiers] = Counter()  # windows of each arm
        self._heats = 0  # heats that are over
        self._heat = deque(self._speeds)  # arms whose window in this heat is to come
        self._follow(self._heat.popleft())
        self._kept = self.arm  # the fastest

    @property
    def window_s(self) -> float:
        """The seconds that a window should have."""
        return TIERS.window_s if self._settled else TIERS.heat_s

    @property
    def long_rest_s(self) -> float:
        """The seconds of a rest of the drafters that count as a window. While an arm is tried, a rest shows what it
        brings, too: the verifier has found that it brings nothing."""
        return math.inf if self._settled and self.arm == self._kept else self.window_s

    def observe(self, done: float, seconds: float, *, rested: bool = False) -> None:
        """Record a window of `seconds` in which `done` tokens were committed. May change the arm.

        `rested`: the drafters had drafted before, and rested in it.
        """
        self._done += done
        self._seconds += seconds
        self._windows += 1
        self._speeds[self.arm].observe(done, seconds)
        self._seen[self.arm] += 1
        for arm in self._due:
            self._due[arm] -= seconds
        if not self._settled:
            if rested:
                self._give_up(done / seconds)
            if self._seconds >= TIERS.heat_s:
                self._next_in_heat()
            return
        least, most = TIERS.proof
        if self._windows >= most or (self._windows >= least and self._clear):
            self._select_arm()

    def estimates(self) -> dict[str, Any]:
        """Return the arm in use, whether the heats are over, and each arm's measured speed and when it is tried
        again."""
        return {
            "arm": self.name(self.arm),
            "settled": self._settled,
            "arms": {
                self.name(arm): {"per_s": it.ratio, "windows": self._seen[arm], "trial_in_s": max(0.0, self._due[arm])}
                for arm, it in tuple(self._speeds.items())
            },
        }

    @staticmethod
    def name(arm: Tiers) -> str:
        """Return the tiers' numbers, for people."""
        return "+".join(map(str, sorted(arm)))

    @property
    def _settled(self) -> bool:
        return self._heats >= TIERS.heats

    def _give_up(self, plain: float) -> None:
        """Take account of an arm that has used up the verifier's delay budget, so that plain decoding is in force.

        Another such arm would cost seconds of it. So the heats are over if some arm was clearly faster than plain
        decoding; if none was, arms with the same first tier, which drafts for the target, have no turn.
        """
        if max(speed.ratio for speed in self._speeds.values()) >= TIERS.clear * plain:
            self._heats = TIERS.heats - 1
            self._heat.clear()
        else:
            self._heat = deque(arm for arm in self._heat if min(arm) != min(self.arm))

    def _next_in_heat(self) -> None:
        """Go on to the next arm of the heat; behind the last one, to the next heat, or to the fastest arm."""
        if not self._heat:
            self._heats += 1
            order = sorted(self._speeds, key=lambda arm: -self._speeds[arm].ratio)
            best = self._speeds[order[0]].ratio
            again = [it for it in order[: TIERS.finalists] if self._speeds[it].ratio * TIERS.clear >= best]
            if self._settled or len(again) < 2:
                self._heats = TIERS.heats
                self._kept = order[0]
                apart = pause_after(0.0, TIERS.proof[0] * TIERS.window_s)
                self._due = {arm: apart * place for place, arm in enumerate(order)}
                self._follow(order[0])
                return
            self._heat.extend(again)
        self._follow(self._heat.popleft())

    @property
    def _clear(self) -> bool:
        speeds = sorted(self._speeds[arm].ratio for arm in (self.arm, self._kept))
        return speeds[1] > TIERS.clear * speeds[0]

    def _select_arm(self) -> None:
        if self.arm == self._kept:
            due = min((arm for arm in self._due if arm != self.arm), key=lambda arm: self._due[arm])
            if self._due[due] <= 0.0:
                self._speeds[due] = FadingRatio(QUICK)
                self._follow(due)
            return
        loser, winner = sorted((self.arm, self._kept), key=lambda arm: self._speeds[arm].ratio)
        usual = self._speeds[self._kept].ratio
        lost = self._seconds - self._done / usual if usual else 0.0
        self._due[loser] = pause_after(lost, self._seconds)
        self._kept = winner
        self._follow(winner)

    def _follow(self, arm: Tiers) -> None:
        self.arm = arm  # to use now
        self._windows, self._done, self._seconds = 0, 0.0, 0.0  # since the last change


class TierSwitch:
    """Selects tiers for all generations of a router. Greedy generations are measured separately, because drafters
    predict them better."""

    def __init__(self, *, measured: bool = True) -> None:
        """If not `measured`, all tiers always draft."""
        self._measured = measured
        self._selectors: dict[tuple[Tiers, bool], TierSelector] = {}

    def wanted(self, present: Tiers, greedy: bool) -> Tiers:
        """Return the tiers, among those `present`, that should draft now."""
        if len(present) < 2 or not self._measured:
            return present
        if (present, greedy) not in self._selectors:
            self._selectors[present, greedy] = TierSelector(_sets(present))
        return self._selectors[present, greedy].arm

    def window_s(self, present: Tiers, greedy: bool) -> float:
        """Return the seconds that a window should have, after which the tiers that draft may change."""
        selector = self._selectors.get((present, greedy))
        return TIERS.window_s if selector is None else selector.window_s

    def long_rest_s(self, present: Tiers, greedy: bool) -> float:
        """Return the seconds of a rest of the drafters that count as a window; infinity if none does."""
        selector = self._selectors.get((present, greedy))
        return math.inf if selector is None else selector.long_rest_s

    def estimates(self) -> list[dict[str, Any]]:
        """Return the measured speeds of sets of tiers, in tokens per second, for each set that was present."""
        return [
            {"present": sorted(present), "greedy": greedy, **selector.estimates()}
            for (present, greedy), selector in tuple(self._selectors.items())
        ]

    def observe(
        self, present: Tiers, greedy: bool, used: Tiers, tokens: int, seconds: float, *, rested: bool = False
    ) -> None:
        """Record a time window of a generation: with the tiers `used`, `tokens` tokens took `seconds` seconds, in which
        their drafters rested or not."""
        selector = self._selectors.get((present, greedy))
        if selector is not None and used == selector.arm and tokens:
            selector.observe(tokens, seconds, rested=rested)


def _sets(present: Tiers) -> list[Tiers]:
    """Return the sets of tiers to try, in the order of the first heat.

    A set that costs more than it brings uses up the verifier's delay budget, and gains refill it. So those are first
    whose first tier is small (a high number) and has tiers below it; the lowest tier alone, mostly a lookup, is last.
    """
    count = len(present)
    sizes = range(count, 0, -1) if count <= TIERS.all_sets else (count, count - 1, 1)
    sets = [frozenset(some) for size in sizes for some in combinations(sorted(present), size)]
    return sorted(sets, key=lambda some: -1 if min(some) == max(present) else min(some), reverse=True)
