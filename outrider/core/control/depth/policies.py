"""Gamma policies: how far drafting may run ahead, decided from the reports of verifier steps.

A policy sets ceilings. Within them the verifier takes the nodes that are worth verifying. A ceiling that is a little
too high costs drafts that are never verified; one that is too low costs accepted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from outrider.core.control.depth.goodput import AcceptancePriors, Goodput
from outrider.core.session.contract import OFF, Plan, PlanOverlap, StepReport
from outrider.core.stats import Ema
from outrider.errors import InvalidRequest


class GammaPolicy(Protocol):
    """Receives every step of one session in order. The plan's version rises when, and only when, the plan changes."""

    _plan: Plan

    def observe(self, report: StepReport) -> None:
        """Add one step."""

    def plan(self) -> Plan:
        """Return the ceilings for the next steps."""
        return self._plan

    def estimates(self) -> dict[str, Any]:
        """Return what the policy decides from."""
        return {"depth": self._plan.depth}


class FixedGamma(GammaPolicy):
    """Keeps the same ceilings for the whole generation."""

    def __init__(self, ceilings: Plan) -> None:
        self._plan = replace(ceilings, version=1)

    def observe(self, report: StepReport) -> None:
        """Do nothing."""


class RoundsPolicy(FixedGamma):
    """A fixed gamma in rounds, as a baseline: each step waits for a chain of gamma tokens and verifies all of them.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1, under the generation's own acceptance rule.
    """

    def __init__(self, ceilings: Plan) -> None:
        depth = min(ceilings.depth, ceilings.nodes)
        super().__init__(replace(ceilings, depth=depth, width=1, nodes=depth, overlap=PlanOverlap.ROUNDS))


class NoSpeculation(FixedGamma):
    """Plain decoding, without drafts."""

    def __init__(self) -> None:
        super().__init__(OFF)


class AcceptanceEMA(GammaPolicy):
    """Sets the depth from a moving average of accepted tokens per step: twice the average plus two, up to the ceiling.

    The depth is larger than the average acceptance, so that it can also follow acceptance upward. Steps that verified
    no node are ignored. Against oscillation, a depth holds for at least `dwell` steps, and until the average requires a
    depth that differs by a third (two at least), or the ceiling. The first depth is the ceiling. `alpha` is the weight
    of one step in the average.

    Source: the acceptance-length average of SGLang's adaptive speculation, with hysteresis and dwell.
    """

    def __init__(self, ceilings: Plan, *, alpha: float = 0.05, dwell: int = 32) -> None:
        self._ceiling = ceilings.depth
        self._plan = replace(ceilings, version=1)
        self._dwell = dwell
        self._average = Ema(alpha, mean=max(0.0, (ceilings.depth - 2) / 2))  # as if the first depth were right
        self._steps = 0  # since the depth changed

    def observe(self, report: StepReport) -> None:
        """Update the average, and the depth when it may change."""
        if not report.verified:
            return
        self._average.observe(report.accepted)
        self._steps += 1
        wanted = max(1, min(self._ceiling, round(2 * self._average.mean) + 2))
        far = abs(wanted - self._plan.depth) >= max(2, self._plan.depth // 3)
        if self._steps >= self._dwell and wanted != self._plan.depth and (far or wanted == self._ceiling):
            self._plan = replace(self._plan, version=self._plan.version + 1, depth=wanted)
            self._steps = 0

    def estimates(self) -> dict[str, Any]:
        """Return the depth and the average."""
        return {"depth": self._plan.depth, "accepted_per_step": self._average.mean}


class Heuristic(GammaPolicy):
    """Raises the depth by two after a step that accepted its deepest verified level, else lowers it by one; at least 1.

    Source: `heuristic` of the assistant's `num_assistant_tokens_schedule` in Hugging Face transformers.
    """

    def __init__(self, ceilings: Plan, *, first: int = 5) -> None:
        self._ceiling = ceilings.depth
        self._plan = replace(ceilings, version=1, depth=min(first, ceilings.depth))

    def observe(self, report: StepReport) -> None:
        """Change the depth after each step that verified at least one node."""
        if not report.verified:
            return
        deeper = self._plan.depth + (2 if report.accepted >= report.verified_depth else -1)
        depth = max(1, min(self._ceiling, deeper))
        if depth != self._plan.depth:
            self._plan = replace(self._plan, version=self._plan.version + 1, depth=depth)


POLICIES: dict[str, Callable[[Plan, AcceptancePriors], GammaPolicy]] = {
    "goodput": Goodput,
    "ema": lambda ceilings, _: AcceptanceEMA(ceilings),
    "heuristic": lambda ceilings, _: Heuristic(ceilings),
    "fixed": lambda ceilings, _: FixedGamma(ceilings),
    "rounds": lambda ceilings, _: RoundsPolicy(ceilings),
    "off": lambda *_: NoSpeculation(),
}


def policy(name: str, ceilings: Plan, priors: AcceptancePriors | None = None) -> GammaPolicy:
    """Return a new policy for one session. Ceilings without depth or nodes give no speculation under any name.

    `priors` are shared with similar sessions. Raises InvalidRequest for a name that is not in POLICIES.
    """
    if name not in POLICIES:
        raise InvalidRequest("speculation.policy", f"is {name!r}, must be one of {', '.join(sorted(POLICIES))}")
    if not ceilings.depth or not ceilings.nodes:
        return NoSpeculation()
    return POLICIES[name](ceilings, priors or AcceptancePriors())
