"""Compares two generations up to rounding errors, and measures how much a text repeats itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import NamedTuple

from outrider.client import Generation

# A gap is the lead of the chosen token's log-probability plus noise over that of the next best token. Two ways to
# compute the same logits differ by rounding, so with a lead below these values either token may be chosen.
TOLERANCE = {"bfloat16": 0.25, "float32": 1e-3}


class Verdict(StrEnum):
    """Result of comparing two generations with the same prompt, seed and contract."""

    IDENTICAL = "identical"
    NEAR_TIE = "near tie"  # the first difference is a choice that rounding may decide
    BUG = "bug"


@dataclass(frozen=True, slots=True)
class GenerationPair:
    """One prompt at one temperature, generated without and with speculation."""

    temperature: float
    plain: Generation
    speculative: Generation
    verdict: Verdict


class Difference(NamedTuple):
    """The first position at which two answers with the same contract differ."""

    position: int  # in the answer, from 0
    first: int | None  # token of the first answer at that position; None: the answer has ended
    second: int | None  # token of the second answer; None as for `first`
    gap: float  # the smaller of the known leads at that position; infinite if no lead is known

    def judged(self, tolerance: float) -> Verdict:
        """Return NEAR_TIE if the gap is below `tolerance`, so that rounding may have decided, else BUG."""
        return Verdict.NEAR_TIE if self.gap < tolerance else Verdict.BUG


def difference(
    first: Sequence[int], second: Sequence[int], first_gaps: Sequence[float], second_gaps: Sequence[float]
) -> Difference | None:
    """Return the first difference of two token sequences, or None if they are equal.

    Later positions are not compared: after a difference the two texts have different prefixes.
    """
    for position, (one, other) in enumerate(zip_longest(first, second)):
        if one != other:
            leads = [gaps[position] for gaps in (first_gaps, second_gaps) if position < len(gaps)]
            return Difference(position, one, other, min((lead for lead in leads if lead == lead), default=math.inf))
    return None


def verdict(first: Generation, second: Generation, tolerance: float) -> Verdict:
    """Compare two generations up to their first difference."""
    found = difference(first.token_ids, second.token_ids, first.gaps, second.gaps)
    if found is not None:
        return found.judged(tolerance)
    same = (first.text, first.finish_reason) == (second.text, second.finish_reason)
    return Verdict.IDENTICAL if same else Verdict.BUG


def repeated_share(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """Return the share of n-grams that occurred earlier in the same text: 0 if all are new, near 1 in a loop."""
    total = new = 0
    for tokens in texts:
        grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
        total += len(grams)
        new += len(set(grams))
    return 1.0 - new / total if total else 0.0
