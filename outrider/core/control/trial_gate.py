"""Decides whether an optional feature that costs every step a little pays: lookahead decoding (docs/drafters.md,
"Drafting without a model"), and heads on the target. Gains and costs are in tokens per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.core.control.trials import pause_after
from outrider.core.stats import LONG, FadingRatio


@dataclass(frozen=True, slots=True)
class GateTuning:
    """How a feature is tried."""

    steps: int = 48  # of a trial
    max_cost_tokens: float = 0.5  # per step: a trial that costs more is postponed, for too many sessions would pay


GATE = GateTuning()


class TrialGate:
    """Tries a feature, and switches it off while its measured gain is below its cost.

    The gain is the average number of tokens that the feature added. The cost is the number of tokens that the step in
    question could commit in the feature's time. So when passes become longer, or are shared by more sessions, the
    feature is switched off without a trial.
    """

    def __init__(self, max_cost_tokens: float = GATE.max_cost_tokens) -> None:
        self._max_cost_tokens = max_cost_tokens
        self._gains = FadingRatio(LONG)  # of steps that used the feature
        self._left = GATE.steps  # remaining steps of the running trial
        self._lost = 0.0  # tokens that the trial cost at most
        self._due = 0.0  # tokens to commit until the next trial

    @property
    def gain(self) -> float:
        """Tokens that the feature adds per step, on average; 0 before the first observation."""
        return self._gains.ratio

    @property
    def trying(self) -> bool:
        """Whether a trial runs."""
        return self._left > 0

    def estimates(self) -> dict[str, Any]:
        """Return the measured gain, and when the next trial is due."""
        return {"gain_tokens": self.gain, "trying": self.trying, "trial_in_tokens": max(0.0, self._due)}

    def takes(self, cost_tokens: float, *, trial: bool) -> bool:
        """Return whether a step should use the feature at that cost. With `trial`, also for a trial if one runs."""
        return self.gain > cost_tokens or (trial and self.trying and cost_tokens <= self._max_cost_tokens)

    def observe(self, gain: float, cost_tokens: float) -> None:
        """Record a step that used the feature: the tokens that it added, and its cost in tokens."""
        self._gains.observe(gain)
        if self.trying:
            self._left -= 1
            self._lost += cost_tokens
            self._due = pause_after(self._lost)

    def observe_unused(self, tokens: int) -> None:
        """Record a step that did not use the feature though it could have, and the tokens that the step committed."""
        self._due -= tokens
        if not self.trying and self._due <= 0.0:
            self._gains, self._lost = FadingRatio(LONG), 0.0
            self._left = GATE.steps
