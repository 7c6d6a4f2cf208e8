"""What is simulated: machines, network, traffic. Also the sections of a scenario's TOML file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Self

from pydantic import Field, model_validator

from outrider.config import Section

Share = Annotated[float, Field(ge=0, le=1)]


class Kind(Section):
    """One kind of text: how often the target agrees with its drafters."""

    name: str  # which phases give
    agreement: Share  # chance that a node's children hold the target's token, if there are enough of them
    ranks: tuple[Share, ...] = (0.80, 0.12, 0.05, 0.03)  # where it is then, best child first
    prompt: int = Field(default=64, ge=1)  # tokens
    answer: int = Field(default=192, ge=1)  # tokens


class Phase(Section):
    """Some time of steady traffic."""

    seconds: float = Field(gt=0)  # how long it lasts
    kinds: tuple[str, ...] = Field(min_length=1)  # names; as many sessions of each
    rate: float = Field(default=0.0, ge=0)  # sessions that arrive a second, at random
    callers: int = Field(default=0, ge=0)  # or so many of them, each of whom asks again when answered
    round_trip_ms: float = Field(default=0.0, ge=0)  # between drafters and verifiers
    jitter_ms: float = Field(default=0.0, ge=0)  # standard deviation of one way


class Deployment(Section):
    """The machines, and what they take."""

    # t(n): milliseconds of a pass over n tokens; `outrider describe` prints them of a server
    pass_ms: dict[int, Annotated[float, Field(gt=0)]] = Field(
        default={1: 20.0, 8: 21.0, 16: 24.0, 32: 32.0, 64: 52.0, 128: 96.0}, min_length=1
    )
    verifiers: int = Field(default=1, ge=1)  # which are all alike
    slots: int = Field(default=32, ge=1)  # of a verifier
    drafters: int = Field(default=1, ge=0)  # which are all alike
    level_ms: float = Field(default=1.5, gt=0)  # a drafter's pass over one session's level
    level_more_ms: float = Field(default=0.2, ge=0)  # for each session more in it
    overhead_ms: float = Field(default=1.5, ge=0)  # of a step beside its pass
    max_nodes: int = Field(default=64, ge=0)  # of a step
    prefill_chunk: int = Field(default=128, ge=1)  # tokens of prompts in a step


class Scenario(Section):
    """A deployment, and the traffic on it: phases, one after another."""

    deployment: Deployment = Deployment()  # the machines
    kind: list[Kind] = Field(min_length=1)  # of text; one section each
    phase: list[Phase] = Field(min_length=1)  # in their order; one section each

    @model_validator(mode="after")
    def _kinds_are_known(self) -> Self:
        names = {kind.name for kind in self.kind}
        for phase in self.phase:
            if unknown := set(phase.kinds) - names:
                raise ValueError(f"phase.kinds: {', '.join(sorted(unknown))}: there is no such kind")
        return self


@dataclass(slots=True)
class Outcome:
    """What came of a simulation, or of one of its phases. Times in seconds."""

    seconds: float = 0.0
    tokens: int = 0  # committed
    steps: int = 0  # in which a session decoded
    answers: int = 0
    switches: int = 0  # of a session's plan
    session_seconds: float = 0.0
    passes: float = 0.0  # of verifiers
    drafting: float = 0.0  # of drafters

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens a step and session."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def switches_per_second(self) -> float:
        """Of one session."""
        return self.switches / self.session_seconds if self.session_seconds else 0.0


def together(outcomes: Iterable[Outcome]) -> Outcome:
    """What came of several phases."""
    whole = Outcome()
    for outcome in outcomes:
        for figure in fields(Outcome):
            setattr(whole, figure.name, getattr(whole, figure.name) + getattr(outcome, figure.name))
    return whole
