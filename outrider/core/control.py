"""Gamma policies: how far drafting may run ahead, decided from what verifier steps report.

A policy sets ceilings. Within them the verifier takes the nodes that are worth a step, so a ceiling that is a
little too high costs drafting that nobody reads, and one that is too low costs accepted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from outrider.core.contract import OFF, Overlap, Plan, StepReport
from outrider.core.goodput import Goodput, Lessons
from outrider.errors import InvalidRequest


class GammaPolicy(Protocol):
    """Sees every step of one session in order. The version rises when, and only when, the plan changes."""

    def observe(self, report: StepReport) -> None:
        """Takes one step's figures."""

    def plan(self) -> Plan:
        """The ceilings from here on."""


class FixedGamma:
    """The same ceilings for the whole generation."""

    def __init__(self, ceilings: Plan) -> None:
        self._plan = replace(ceilings, version=1)

    def observe(self, report: StepReport) -> None:
        """Changes nothing."""

    def plan(self) -> Plan:
        """The ceilings."""
        return self._plan


class Rounds(FixedGamma):
    """A fixed gamma as others have it, to compare with: a chain of that many tokens, of which all are verified.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1, under the generation's own rule of acceptance.
    """

    def __init__(self, ceilings: Plan) -> None:
        depth = min(ceilings.depth, ceilings.nodes)
        super().__init__(replace(ceilings, depth=depth, width=1, nodes=depth, overlap=Overlap.ROUNDS))


class NoSpeculation(FixedGamma):
    """Plain decoding."""

    def __init__(self) -> None:
        super().__init__(OFF)


class AcceptanceEMA:
    """Depth from a moving average of the accepted length: twice the average plus two, up to the ceiling.

    The depth lies above what is accepted on average, so it follows acceptance upward too. Steps that verified
    nothing say nothing about acceptance and are passed over. Against flipping on noise, a depth holds for at
    least `dwell` steps, and until the average asks for one that is a third of it away (two at least), or for
    the ceiling. It starts at the ceiling.

    Source: the acceptance-length average of SGLang's adaptive speculation, with hysteresis and dwell.
    """

    def __init__(self, ceilings: Plan, *, alpha: float = 0.05, dwell: int = 32) -> None:
        self._ceiling = ceilings.depth
        self._plan = replace(ceilings, version=1)
        self._alpha = alpha
        self._dwell = dwell
        self._average = max(0.0, (ceilings.depth - 2) / 2)  # the average that the first depth is right for
        self._steps = 0  # since the depth changed

    def observe(self, report: StepReport) -> None:
        """Moves the average, and the depth when it is time."""
        if not report.verified:
            return
        self._average += self._alpha * (report.accepted - self._average)
        self._steps += 1
        wanted = max(1, min(self._ceiling, round(2 * self._average) + 2))
        far = abs(wanted - self._plan.depth) >= max(2, self._plan.depth // 3)
        if self._steps >= self._dwell and wanted != self._plan.depth and (far or wanted == self._ceiling):
            self._plan = replace(self._plan, version=self._plan.version + 1, depth=wanted)
            self._steps = 0

    def plan(self) -> Plan:
        """The ceilings, with the present depth."""
        return self._plan


class Heuristic:
    """Two deeper after a step that accepted all it verified, else one less deep, at least one.

    Source: `heuristic` of the assistant's `num_assistant_tokens_schedule` in Hugging Face transformers.
    """

    def __init__(self, ceilings: Plan, *, first: int = 5) -> None:
        self._ceiling = ceilings.depth
        self._plan = replace(ceilings, version=1, depth=min(first, ceilings.depth))

    def observe(self, report: StepReport) -> None:
        """Changes the depth after each step that verified anything."""
        if not report.verified:
            return
        deeper = self._plan.depth + (2 if report.accepted >= report.verified_depth else -1)
        depth = max(1, min(self._ceiling, deeper))
        if depth != self._plan.depth:
            self._plan = replace(self._plan, version=self._plan.version + 1, depth=depth)

    def plan(self) -> Plan:
        """The ceilings, with the present depth."""
        return self._plan


POLICIES: dict[str, Callable[[Plan, Lessons], GammaPolicy]] = {
    "goodput": Goodput,
    "ema": lambda ceilings, _: AcceptanceEMA(ceilings),
    "heuristic": lambda ceilings, _: Heuristic(ceilings),
    "fixed": lambda ceilings, _: FixedGamma(ceilings),
    "rounds": lambda ceilings, _: Rounds(ceilings),
    "off": lambda *_: NoSpeculation(),
}


def policy(name: str, ceilings: Plan, lessons: Lessons | None = None) -> GammaPolicy:
    """A new policy for one session. Ceilings without depth or nodes allow no speculation, whatever its name.

    `lessons`: of sessions like it, to share.

    Raises InvalidRequest for a name that is not in POLICIES.
    """
    if name not in POLICIES:
        raise InvalidRequest("speculation.policy", f"is {name!r}, must be one of {', '.join(sorted(POLICIES))}")
    if not ceilings.depth or not ceilings.nodes:
        return NoSpeculation()
    return POLICIES[name](ceilings, lessons or Lessons())
