"""The ways in which a verifier and its drafters may work together, and what they are compared by."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from outrider.core.control.cost.plain_pace import StepWork


class OverlapMode(Enum):
    """How drafters work beside a verifier's steps, as far as a session's `PlanOverlap` allows it."""

    TURNS = "turns"  # a step may be held back for drafters, and drafters do not draft while it runs
    AHEAD = "ahead"  # drafters draft while steps run
    REST = "rest"  # drafters do not draft


MODES = (OverlapMode.TURNS, OverlapMode.AHEAD)  # the modes in which drafters draft


class VerifierLoad(NamedTuple):
    """What arms are compared for separately."""

    size: int  # the rounded log2 of the number of open sessions
    greedy: bool  # whether nearly all sessions are greedy
    representative: bool  # whether some session is representative, so that these alone count

    @property
    def sessions(self) -> int:
        """The number of sessions that the size stands for."""
        return 1 << self.size


class Arm(NamedTuple):
    """A way of working."""

    mode: OverlapMode
    denominator: int  # drafts for 1 / denominator of the sessions; 0: for none

    def drafted(self, sessions: int) -> int:
        """Return how many of `sessions` are drafted for, rounded up."""
        return -(-sessions // self.denominator) if self.denominator else 0

    def __str__(self) -> str:
        return self.mode.value if self.denominator < 2 else f"{self.mode.value} 1/{self.denominator}"

    @classmethod
    def parse(cls, name: str) -> Arm:
        """Return the arm of this name, as `str` gives it."""
        mode, _, share = name.partition(" 1/")
        return PLAIN if name == str(PLAIN) else cls(OverlapMode(mode), int(share or 1))


PLAIN = Arm(OverlapMode.REST, 0)


class StepOutcome(NamedTuple):
    """A step, as the governor needs it."""

    work: StepWork
    expected: float  # tokens that it was expected to commit, over all sessions
    seconds: float  # since the commits of the step before
    eligible: int  # open sessions that may be drafted for
    drafting: int  # those that have a drafter and should have one
