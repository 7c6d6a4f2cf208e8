"""What drafting so deep would bring: expected tokens a second, from what was measured.

The verifier takes of a tree what is worth its rows, so nodes cost nothing here but the time for which a step is held
back for them. A step commits 1 + the sum of the chances to reach each depth (OPT-Tree, arXiv 2406.17276, section 3),
and takes as long as it does plus that time: TurboSpec's goodput (arXiv 2406.14066) with the round trip in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Of one session's steps. Times in seconds."""

    step: float  # from commit to commit, but for holds
    first: float  # from a commit to the first level: round trip, queue, one pass of the drafter
    level: float  # for each level more
    hidden: float = 0.0  # of that time, what does not hold a step back
    others: float = 0.0  # tokens that other sessions commit in a step


def speed(depth: int, reach: Sequence[float], here: Circumstances) -> float:
    """Tokens a second of all the sessions that share the steps, if this one is drafted `depth` levels.

    `reach`: the chance that each depth is accepted, at least as many as `depth`.
    """
    held = max(0.0, here.first + (depth - 1) * here.level - here.hidden) if depth else 0.0
    return (here.others + 1.0 + sum(reach[:depth])) / (here.step + held)


def best_depth(reach: Sequence[float], here: Circumstances, slack: float = 0.0) -> int:
    """How deep to let drafters run; 0 where plain decode is as fast.

    The deepest that is at most the share `slack` slower than the best: the chances are averages, and where a path is
    surer than that the verifier takes more of it.
    """
    speeds = [speed(depth, reach, here) for depth in range(len(reach) + 1)]
    enough = (1.0 - slack) * max(speeds)
    return 0 if speeds[0] == max(speeds) else max(depth for depth, each in enumerate(speeds) if each >= enough)
