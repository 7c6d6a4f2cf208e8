"""Moving averages: of values (`Ema`), and of hits over attempts (`FadingRatio`)."""

from __future__ import annotations

# Weights of the past at each observation, so that about 20, 50 or 200 observations count: for what changes with the
# load, with a text, and with a machine or a model.
QUICK, RECENT, LONG = 0.95, 0.98, 0.995


class Ema:
    """An exponential moving average. The first value is the mean; each later one moves it by its weight."""

    __slots__ = ("_alpha", "_warm_up", "count", "mean")

    def __init__(self, alpha: float, *, mean: float | None = None, warm_up: bool = False) -> None:
        """`alpha`: weight of a value, from 0 to 1; `mean`: to start from, instead of the first value.

        With `warm_up` the first 1 / alpha values count equally.
        """
        self._alpha = alpha
        self._warm_up = warm_up
        self.count = 0 if mean is None else 1  # values, and the mean to start from
        self.mean = 0.0 if mean is None else mean  # 0 where nothing is known

    @property
    def next_weight(self) -> float:
        """Weight of the next value."""
        return max(self._alpha, 1.0 / (self.count + 1)) if self._warm_up or not self.count else self._alpha

    def observe(self, value: float) -> None:
        """Add a value."""
        self.mean += self.next_weight * (value - self.mean)
        self.count += 1


class FadingRatio:
    """Hits over attempts, or tokens over seconds, of which earlier ones fade.

    Both are kept as totals, so that a prior can be added to each.
    """

    __slots__ = ("_memory", "attempts", "hits")

    def __init__(self, memory: float = RECENT, *, hits: float = 0.0, attempts: float = 0.0) -> None:
        """`memory`: what both totals are multiplied by before each observation, from 0 to 1; `hits` and `attempts`:
        what is assumed at first, and fades like observations."""
        self._memory = memory
        self.hits = hits
        self.attempts = attempts

    def observe(self, hits: float, attempts: float = 1.0, *, steps: float = 1.0) -> None:
        """Add some hits of some attempts, which count as `steps` observations for what fades."""
        memory = self._memory if steps == 1.0 else self._memory**steps
        self.hits = memory * self.hits + hits
        self.attempts = memory * self.attempts + attempts

    @property
    def ratio(self) -> float:
        """Hits over attempts; 0 without attempts."""
        return self.hits / self.attempts if self.attempts else 0.0
