"""Whether something that costs every step a little is worth it: it is tried, measured, and left off while it is not."""

from __future__ import annotations

TRIAL = 48  # steps
LOSS = 0.01  # share of the tokens said that trials may cost
DEAREST = 0.5  # tokens a step: a trial that would cost more waits, for then too many sessions would pay for it
MEMORY = 0.99  # weight of the past at each step


class Worth:
    """Gains against prices, both in tokens a step: what it brought, and what else could have been said in its time.

    The gain is what was measured, the price that of the step in question. So when passes are longer, or shared by more
    sessions, it goes without a trial.
    """

    def __init__(self, dearest: float = DEAREST) -> None:
        self._dearest = dearest
        self._gains = self._steps = 0.0  # weighted
        self._left = TRIAL  # steps of the trial that runs
        self._lost = 0.0  # tokens that it cost at the most
        self._due = 0.0  # tokens to say until the next one

    @property
    def gain(self) -> float:
        """Tokens that it brings a step, as far as is known."""
        return self._gains / self._steps if self._steps else 0.0

    @property
    def trying(self) -> bool:
        """Whether it is on trial."""
        return self._left > 0

    def takes(self, price: float, *, trial: bool) -> bool:
        """Whether a step should have it at that price. `trial`: also to try it, if it is time."""
        return self.gain > price or (trial and self.trying and price <= self._dearest)

    def observe(self, gain: float, price: float) -> None:
        """A step had it."""
        self._gains = MEMORY * self._gains + gain
        self._steps = MEMORY * self._steps + 1.0
        if self.trying:
            self._left -= 1
            self._lost += price
            self._due = self._lost / LOSS

    def rest(self, said: int) -> None:
        """A step that could have had it did not, and said so many tokens."""
        self._due -= said
        if not self.trying and self._due <= 0.0:
            self._gains = self._steps = self._lost = 0.0
            self._left = TRIAL
