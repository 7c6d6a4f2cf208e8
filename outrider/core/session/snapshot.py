"""What a drafter is told of a session: a snapshot to begin from, then updates."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.session.contract import Contract, Plan, SentTerms
from outrider.core.session.digest import NOTHING, Prefix

FeatureRows = NDArray[np.uint16]  # [rows, width], the bits of bfloat16


@dataclass(frozen=True, slots=True)
class MirrorSnapshot:
    """All that a drafter needs to begin: the committed tokens and the terms of drafting."""

    tokens: tuple[int, ...]
    digest: int
    contract: Contract
    plan: Plan
    credit: int
    terms: SentTerms = field(default_factory=SentTerms)
    answer_position: int = 0  # where the contract's penalties and limits count from
    epoch: int = 0
    features: FeatureRows | None = None  # rows for the last tokens; None: not requested
    known: Prefix = NOTHING  # a prefix of the tokens whose digest was computed as they came
    vocabulary: int = 2**32  # ids that the target has
    unpadded_vocabulary: int = 2**32  # the target chooses only ids below it
    representative: bool = True  # false if sampling could not be translated: statistics of this session do not count


@dataclass(frozen=True, slots=True)
class MirrorUpdate:
    """An upstream's Commit frame."""

    position: int
    tokens: tuple[int, ...]
    digest: int
    plan: Plan | None
    terms: SentTerms
    credit: int
    dropped: tuple[int, ...]
    features: FeatureRows | None = None  # a row for each token; None: not requested
