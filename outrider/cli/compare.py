"""Are two generations the same, as far as the numerics allow? And how much of a text repeats itself?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import NamedTuple

from outrider.client import Generation

# A gap is the lead of the chosen token's log-probability plus noise over the next best one's. Two ways to compute the
# same logits differ by rounding, so a lead below these may tip either way.
TOLERANCE = {"bfloat16": 0.25, "float32": 1e-3}


class Verdict(StrEnum):
    """How two generations of one prompt, seed and contract compare."""

    IDENTICAL = "identical"
    NEAR_TIE = "near tie"  # the first difference is a choice that rounding may decide
    BUG = "bug"


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt at one temperature, generated both ways."""

    temperature: float
    plain: Generation
    speculative: Generation
    verdict: Verdict


class Difference(NamedTuple):
    """The first position at which two texts of one contract differ."""

    position: int  # in the answer, from 0
    first: int | None  # the token there; None: the text has ended
    second: int | None
    gap: float  # the smallest lead known there; infinite if none is

    def judged(self, tolerance: float) -> Verdict:
        """Whether rounding may have decided."""
        return Verdict.NEAR_TIE if self.gap < tolerance else Verdict.BUG


def difference(
    first: Sequence[int], second: Sequence[int], first_gaps: Sequence[float], second_gaps: Sequence[float]
) -> Difference | None:
    """Where two token sequences part, None if nowhere; what follows is another text and says nothing."""
    for position, (one, other) in enumerate(zip_longest(first, second)):
        if one != other:
            leads = [gaps[position] for gaps in (first_gaps, second_gaps) if position < len(gaps)]
            return Difference(position, one, other, min((lead for lead in leads if lead == lead), default=math.inf))
    return None


def verdict(first: Generation, second: Generation, tolerance: float) -> Verdict:
    """Compares up to the first difference."""
    parted = difference(first.token_ids, second.token_ids, first.gaps, second.gaps)
    if parted is not None:
        return parted.judged(tolerance)
    same = (first.text, first.finish_reason) == (second.text, second.finish_reason)
    return Verdict.IDENTICAL if same else Verdict.BUG


def repeated_share(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """The share of n-grams that occurred earlier in the same text: 0 is all new, near 1 is a loop."""
    total = new = 0
    for tokens in texts:
        grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
        total += len(grams)
        new += len(set(grams))
    return 1.0 - new / total if total else 0.0
