"""What is simulated: machines, network and traffic. The classes are the sections of a scenario's TOML file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Annotated, Self

from pydantic import Field, model_validator

from outrider.config import Section

Share = Annotated[float, Field(ge=0, le=1)]


class DrafterKind(Section):
    """One kind of text: how often the target agrees with its drafters."""

    name: str  # the name by which phases refer to the kind
    agreement: Share  # probability that the target's token is among a node's children, if there are enough of them
    ranks: tuple[Share, ...] = (0.80, 0.12, 0.05, 0.03)  # share of each child in that probability, best child first
    prompt: int = Field(default=64, ge=1)  # tokens
    answer: int = Field(default=192, ge=1)  # tokens


class TrafficPhase(Section):
    """A time of steady traffic."""

    seconds: float = Field(gt=0)  # duration
    kinds: tuple[str, ...] = Field(min_length=1)  # names of kinds; all get the same number of sessions
    rate: float = Field(default=0.0, ge=0)  # sessions that arrive per second, at random
    callers: int = Field(default=0, ge=0)  # callers, each of whom sends the next request after an answer
    round_trip_ms: float = Field(default=0.0, ge=0)  # between drafters and verifiers
    jitter_ms: float = Field(default=0.0, ge=0)  # standard deviation of the time of one direction


class Deployment(Section):
    """The machines, and how long their work takes."""

    # t(n): milliseconds of a pass over n tokens; `outrider describe` prints them for a server
    pass_ms: dict[int, Annotated[float, Field(gt=0)]] = Field(
        default={1: 20.0, 8: 21.0, 16: 24.0, 32: 32.0, 64: 52.0, 128: 96.0}, min_length=1
    )
    verifiers: int = Field(default=1, ge=1)  # number of verifiers, all alike
    slots: int = Field(default=32, ge=1)  # sessions of one verifier
    drafters: int = Field(default=1, ge=0)  # number of drafters, all alike
    level_ms: float = Field(default=1.5, gt=0)  # of a drafter's pass over one session's level
    level_more_ms: float = Field(default=0.2, ge=0)  # for each further session in the pass
    read_ms: float = Field(default=0.05, ge=0)  # of a drafter, for each token of a text that it has missed
    slowdown: float = Field(default=0.0, ge=0)  # share by which a pass becomes longer where drafters work on its cores
    contention: float = Field(default=0.0, ge=0)  # seconds that a pass becomes longer for each second drafted meanwhile
    overhead_ms: float = Field(default=1.5, ge=0)  # of a step, in addition to its pass
    trees_ms: float = Field(default=0.0, ge=0)  # further milliseconds of a step that verifies drafts: frames and trees
    max_nodes: int = Field(default=64, ge=0)  # nodes that a step verifies at most
    chain: int = Field(default=0, ge=0)  # drafts of a session in a step of an engine like vLLM's; 0: our engine
    prefill_chunk: int = Field(default=128, ge=1)  # prompt tokens that a step reads at most


class Scenario(Section):
    """A deployment and the traffic on it: phases, one after another."""

    deployment: Deployment = Deployment()  # the machines
    kind: list[DrafterKind] = Field(min_length=1)  # the kinds of text; one section each
    phase: list[TrafficPhase] = Field(min_length=1)  # the phases in order; one section each

    @model_validator(mode="after")
    def _kinds_are_known(self) -> Self:
        names = {kind.name for kind in self.kind}
        for phase in self.phase:
            if unknown := set(phase.kinds) - names:
                raise ValueError(f"phase.kinds: {', '.join(sorted(unknown))}: there is no such kind")
        return self


@dataclass(slots=True)
class SimulationOutcome:
    """The outcome of a simulation, or of one of its phases. Times are in seconds."""

    seconds: float = 0.0
    tokens: int = 0  # committed
    steps: int = 0  # steps of decoding sessions: a step counts once for each
    answers: int = 0
    switches: int = 0  # changes of a session's plan, and of a verifier's usual way of working for all its sessions
    session_seconds: float = 0.0
    passes: float = 0.0  # time of the verifiers' passes
    drafting: float = 0.0  # time of the drafters' passes

    @property
    def goodput(self) -> float:
        """Committed tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_length(self) -> float:
        """Committed tokens per step and session."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def switches_per_second(self) -> float:
        """Changes of a session's plan per second."""
        return self.switches / self.session_seconds if self.session_seconds else 0.0


def sum_outcomes(outcomes: Iterable[SimulationOutcome]) -> SimulationOutcome:
    """Return the sum of several phases' outcomes."""
    total = SimulationOutcome()
    for outcome in outcomes:
        for figure in fields(SimulationOutcome):
            setattr(total, figure.name, getattr(total, figure.name) + getattr(outcome, figure.name))
    return total
