"""A verifier of which only the speed of each way of working is modelled, steered by a real governor; and a session as
steering sees it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.core.control.arms.arm import PLAIN, Arm, StepOutcome, VerifierLoad
from outrider.core.control.arms.governor import Governor
from outrider.core.control.cost.plain_pace import PlainPace, StepWork
from outrider.core.control.drafting_terms import DraftingTerms

SWEEP = [(rows, 0.012 + 0.002 * (rows - 1)) for rows in (1, 2, 4, 8, 16, 32, 64)]
OVERHEAD_S = 0.0015
Speedup = Callable[[Arm, float], float]  # speed under an arm, at a time in seconds, over that of plain decoding


@dataclass
class Plant:
    """`sessions` sessions, each of which commits one token a step, or with drafts one and a half more at the mean."""

    sessions: int
    speedup: Speedup
    seed: int = 0
    noise: float = 0.1  # relative deviation of a step's time
    reading_s: float = 0.01  # time that a drafter steals from the steps when it begins with a session
    drift: float = 0.0  # share by which the machine's speed wanders
    pinned: Arm | None = None
    now: float = 0.0
    steps: list[tuple[float, float, float]] = field(default_factory=list)  # (end, seconds, plain decoding's seconds)
    arms: list[tuple[float, Arm]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.governor = Governor(PlainPace(SWEEP), pinned=self.pinned)
        self._random = random.Random(self.seed)
        self._read: set[int] = set()
        self.load = VerifierLoad(round(math.log2(self.sessions)), greedy=False, representative=True)
        self.governor.begin(self.load)

    def run(self, seconds: float) -> Plant:
        """Run steps for `seconds`."""
        until = self.now + seconds
        while self.now < until:
            self._step(self.governor.arm)
        return self

    def _step(self, arm: Arm) -> None:
        count, wanted = self.sessions, arm.drafted(self.sessions)
        plain = (SWEEP[0][1] + 0.002 * (count - 1) + OVERHEAD_S) * (1.0 + self.drift * math.sin(self.now / 7))
        began = [session for session in range(wanted) if session not in self._read]
        self._read.update(began[:1])  # one after another
        drafting = wanted - len(began)
        tokens = count + sum(self._accepted() for _ in range(drafting))
        expected = count + 1.5 * drafting
        speed = self.speedup(arm, self.now) if wanted and drafting == wanted else 1.0
        seconds = plain * expected / count / speed * self._random.lognormvariate(0.0, self.noise)
        seconds += self.reading_s * bool(began)
        self.now += seconds
        self.steps.append((self.now, seconds, plain * tokens / count))
        self.arms.append((self.now, arm))
        work = StepWork(count, 0, tokens)
        self.governor.observe(self.load, StepOutcome(work, expected, seconds, count, drafting))

    def _accepted(self) -> int:
        return sum(self._random.random() < 0.375 for _ in range(4))

    def over_plain(self, begin: float = 0.0, end: float = math.inf) -> float:
        """Return the speed between two times over that of plain decoding."""
        within = [step for step in self.steps if begin < step[0] <= end]
        return sum(plain for _, _, plain in within) / sum(seconds for _, seconds, _ in within)

    def worst_window(self, seconds: float = 10.0) -> float:
        """Return the least `over_plain` of any window of `seconds`."""
        worst, first, plain, took = math.inf, 0, 0.0, 0.0
        for _, lasted, decoded in self.steps:
            plain, took = plain + decoded, took + lasted
            while took - self.steps[first][1] >= seconds:
                plain, took = plain - self.steps[first][2], took - self.steps[first][1]
                first += 1
            if took >= seconds:
                worst = min(worst, plain / took)
        return worst

    def share_of_time(self, begin: float, arm: Arm = PLAIN) -> float:
        """Return the share of the time since `begin` that was spent under an arm."""
        within = [(step[1], used) for step, (end, used) in zip(self.steps, self.arms, strict=True) if end > begin]
        return sum(seconds for seconds, used in within if used == arm) / sum(seconds for seconds, _ in within)


@dataclass(eq=False)
class SteeredSession:
    """A session that has a drafter."""

    terms: DraftingTerms
    representative: bool = True
    greedy: bool = False
    drafting: bool = True
