"""Are two generations the same, as far as the numerics allow? And how much of a text repeats itself?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

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


def verdict(first: Generation, second: Generation, tolerance: float) -> Verdict:
    """Compares up to the first difference; what follows one is another text and says nothing."""
    pairs = enumerate(zip_longest(first.token_ids, second.token_ids))
    position = next((index for index, (one, other) in pairs if one != other), None)
    if position is None:
        same = (first.text, first.finish_reason) == (second.text, second.finish_reason)
        return Verdict.IDENTICAL if same else Verdict.BUG
    gaps = [run.gaps[position] for run in (first, second) if position < len(run.gaps)]
    return Verdict.NEAR_TIE if min(gaps) < tolerance else Verdict.BUG


def repeated_share(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """The share of n-grams that occurred earlier in the same text: 0 is all new, near 1 is a loop."""
    total = new = 0
    for tokens in texts:
        grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
        total += len(grams)
        new += len(set(grams))
    return 1.0 - new / total if total else 0.0
