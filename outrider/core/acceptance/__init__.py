"""Acceptance rules: which drafted tokens are committed, and which token follows them.

A generation's contract names its rule, which never changes. Under every rule but the lossy ones the committed text has
the target's own distribution. Under shared noise the text does not depend on what was drafted.
"""

from outrider.core.acceptance.draft_distribution import SparseRow
from outrider.core.acceptance.interface import ChildSampling, Judge, Rule, VerifiedRows, Walk
from outrider.core.acceptance.rng import DRAFT, VERIFY, RandomSource, SeededRandom
from outrider.core.acceptance.rules import rule_of

__all__ = [
    "DRAFT",
    "VERIFY",
    "ChildSampling",
    "Judge",
    "RandomSource",
    "Rule",
    "SeededRandom",
    "SparseRow",
    "VerifiedRows",
    "Walk",
    "rule_of",
]
