"""A model of goodput by drafting depth: expected tokens per second, from measured times and acceptance rates.

The verifier takes only nodes that are worth their rows, so the only cost of a depth here is the time for which a step
is held back for it. A step commits 1 + the sum of the probabilities to reach each depth (OPT-Tree, arXiv 2406.17276,
section 3); it takes its own time plus the hold. This is TurboSpec's goodput (arXiv 2406.14066) with the round trip
included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GoodputInputs:
    """Averages over one session's steps. Times are in seconds."""

    step: float  # from commit to commit, without holds
    first: float  # from a commit to the first level: round trip, queue, one pass of the drafter
    level: float  # for each further level
    hidden: float = 0.0  # drafting time that does not hold a step back
    others: float = 0.0  # tokens that other sessions commit in a step


def speed(depth: int, reach: Sequence[float], inputs: GoodputInputs) -> float:
    """Return the tokens per second of all sessions that share the steps, if this session is drafted `depth` levels.

    `reach` holds the probability that each depth is accepted: [>= depth].
    """
    held = max(0.0, inputs.first + (depth - 1) * inputs.level - inputs.hidden) if depth else 0.0
    return (inputs.others + 1.0 + sum(reach[:depth])) / (inputs.step + held)


def best_depth(reach: Sequence[float], inputs: GoodputInputs, slack: float = 0.0) -> int:
    """Return how deep drafters may run; 0 where plain decoding is as fast.

    The result is the deepest depth that is at most the share `slack` slower than the best one: the probabilities are
    averages, and where a path is more certain than average the verifier takes more of it.
    """
    speeds = [speed(depth, reach, inputs) for depth in range(len(reach) + 1)]
    enough = (1.0 - slack) * max(speeds)
    return 0 if speeds[0] == max(speeds) else max(depth for depth, each in enumerate(speeds) if each >= enough)
