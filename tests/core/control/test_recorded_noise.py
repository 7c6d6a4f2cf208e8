"""The intervals of paired trials hold on steps of a real verifier, whose noise is neither normal nor independent.

`recorded_steps.npz` has plain decoding on two cores that other processes share, the target at 150M, with 1, 8 and 32
callers: for each step the microseconds that `PlainPace` gave for its work, its tokens, and the microseconds that it
took.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core.control.arms.load_governor import GOVERNOR
from outrider.core.control.trials import TRIALS, PairedDifference, PairedTrial

RECORDED = Path(__file__).parent / "recorded_steps.npz"
APART = 3  # steps between the beginnings of two trials


def trials(steps: np.ndarray[Any, Any], pairs: int) -> Iterator[PairedDifference]:
    """What trials find whose challenger is the usual way of working itself, one from each third step on."""
    for first in range(0, len(steps), APART):
        trial, at = PairedTrial(PairedDifference()), first
        while trial.blocks < 2 * pairs:
            if at >= len(steps):
                return
            challenged, (work, tokens, seconds) = trial.challenged, steps[at]
            trial.observe(work * 1e-6, tokens, seconds * 1e-6)
            at += 1 if trial.challenged is challenged else 1 + GOVERNOR.settling
        yield trial.difference


def test_the_intervals_hold_at_their_stated_rate() -> None:
    with np.load(RECORDED) as recorded:
        for pairs in (TRIALS.min_pairs, 5, TRIALS.max_pairs):
            found = [it for name in recorded.files for it in trials(recorded[name].astype(float), pairs)]
            held = sum(it.low < 0.0 < it.high for it in found) / len(found)
            assert 0.93 < held < 0.97, pairs
            assert abs(sum(it.mean for it in found) / len(found)) < 0.01
