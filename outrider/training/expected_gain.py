"""What a trained drafter is worth on this machine: acceptance by depth against what levels and passes take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from outrider.engine.loading import load_engine
from outrider.training.answers.writing import serving_dtype

CONTEXT = 256  # tokens before what is timed
REPEATS = 7


class ExpectedGain(NamedTuple):
    """The chain of drafts that pays most, and its speed-up over plain decoding."""

    depth: int  # drafts before a pass
    tokens_a_step: float
    level_s: float  # time of one draft
    plain_s: float  # of a pass of one row
    pass_s: float  # of a pass over the chain
    speedup: float

    def __str__(self) -> str:
        return (
            f"a level takes {1e3 * self.level_s:.2f} ms, a pass {1e3 * self.plain_s:.2f} ms and one over {self.depth} "
            f"drafts {1e3 * self.pass_s:.2f} ms; with {self.tokens_a_step:.2f} tokens a step, drafter and target in "
            f"turns are {self.speedup:.2f} times as fast as the target alone"
        )


def expected_gain(
    target: Path, drafter: Path, tokens_a_step: Sequence[float], device: str, threads: int
) -> ExpectedGain:
    """Time both models as they would serve. `tokens_a_step`: with chains of 1, 2, ... drafts.

    Drafter and target take turns on the same cores: with drafters elsewhere more is to be had, with trees, too. Raises
    CheckpointError.
    """
    depths = range(1, len(tokens_a_step) + 1)
    (level,) = _seconds(drafter, [1], device, threads)
    plain, *passes = _seconds(target, [1, *(1 + depth for depth in depths)], device, threads)
    gains = [
        ExpectedGain(depth, tokens, level, plain, taken, tokens * plain / (taken + depth * level))
        for depth, tokens, taken in zip(depths, tokens_a_step, passes, strict=True)
    ]
    return max(gains, key=lambda it: it.speedup)


def _seconds(checkpoint: Path, rows: Sequence[int], device: str, threads: int) -> list[float]:
    """Return the time of a pass over each number of rows."""
    dtype = serving_dtype(checkpoint, device)
    engine = load_engine(checkpoint, dtype=dtype, device=device, slots=1, rows=CONTEXT + 2 * max(rows), threads=threads)
    try:
        found = dict(engine.measure_costs(rows, CONTEXT, REPEATS))
    finally:
        engine.close()
        torch.set_num_threads(threads)
    return [found[count] for count in rows]
