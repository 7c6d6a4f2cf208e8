"""What a generation promises, and the ceilings that speculation for it obeys."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from outrider.errors import InvalidRequest

SHARED_NOISE = "shared-noise"
MAX_STOP_IDS = 64
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Contract:
    """The immutable terms of one generation. Raises InvalidRequest, naming the field, when one is absurd."""

    seed: int  # 0 .. 2**64 - 1
    max_tokens: int  # new tokens at most
    choice: int = 0  # which of several samples, 0 .. 2**32 - 1
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 1 keeps all
    stop_ids: tuple[int, ...] = ()  # ids that end the generation
    rule: str = SHARED_NOISE
    logprobs: int | None = None  # alternatives whose log-probabilities go with each token's own; None: none at all

    def __post_init__(self) -> None:
        checks = (
            ("seed", 0 <= self.seed < 2**64, "an integer from 0 to 2**64 - 1"),
            ("choice", 0 <= self.choice < 2**32, "an integer from 0 to 2**32 - 1"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "a number from 0 to 100"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (all) or a positive integer"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number above 0 and at most 1"),
            ("stop_ids", len(self.stop_ids) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS} ids"),
            ("rule", self.rule == SHARED_NOISE, f"'{SHARED_NOISE}'"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"absent or 0 to {MAX_LOGPROBS}"),
        )
        for field, holds, allowed in checks:
            if not holds:
                raise InvalidRequest(field, f"is {getattr(self, field)!r}, must be {allowed}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always the one."""
        return self.temperature == 0.0


class Overlap(IntEnum):
    """Whether drafters go on while a step runs."""

    MEASURED = 0  # if that was measured to be the faster way
    ALWAYS = 1
    NEVER = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """Ceilings on speculation for one session. A higher version replaces a lower one."""

    version: int = 0
    depth: int = 0  # gamma: tokens beyond the root; 0 is no speculation
    width: int = 4  # children of one node
    nodes: int = 32  # nodes of the session in one verifier step
    wait_us: int = 500_000  # longest deliberate hold of a step
    overlap: Overlap = Overlap.MEASURED

    def __post_init__(self) -> None:
        limits = (("depth", 64), ("width", 64), ("nodes", 1024), ("wait_us", 10_000_000), ("overlap", 2))
        for field, most in limits:
            if not 0 <= getattr(self, field) <= most:
                raise InvalidRequest(f"plan.{field}", f"is {getattr(self, field)}, must be 0 to {most}")
        object.__setattr__(self, "overlap", Overlap(self.overlap))  # it may come as a number


OFF = Plan(depth=0, nodes=0, wait_us=0)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one verifier step did for one session."""

    verified: int = 0  # nodes verified
    accepted: int = 0  # of these, committed
    verified_depth: int = 0  # depth of the deepest verified node
    waited_us: int = 0
    forward_us: int = 0
    wire_bytes: int = 0  # on drafters' streams since the last report, both directions
    plan_version: int = 0
    drafters: int = 0
