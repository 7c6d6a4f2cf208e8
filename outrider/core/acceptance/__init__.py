"""Acceptance rules: which drafted tokens are committed, and which token follows them.

A generation's contract names its rule, which never changes. Under every rule but the lossy ones the committed text has
the target's own distribution. Under shared noise the text does not depend on what was drafted.
"""

from outrider.core.acceptance.block_verification import BlockVerification, TraversalVerification
from outrider.core.acceptance.draft_distribution import SparseRow
from outrider.core.acceptance.exact_match import SharedNoise, TargetMatch
from outrider.core.acceptance.rejection import LenientSpeculativeSampling, RecursiveRejection, SpeculativeSampling
from outrider.core.acceptance.rng import DRAFT, VERIFY, RandomSource, SeededRandom
from outrider.core.acceptance.rule import ChildSampling, Judge, Rule, VerifiedRows, Walk
from outrider.core.acceptance.typical import TypicalAcceptance
from outrider.core.session.contract import Contract

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

_LOSSLESS: tuple[Rule, ...] = (
    SharedNoise(),
    TargetMatch(),
    SpeculativeSampling(),
    RecursiveRejection(),
    BlockVerification(),
    TraversalVerification(),
)
_BY_NAME = {rule.name: rule for rule in _LOSSLESS}


def rule_of(contract: Contract) -> Rule:
    """Return the rule that a contract names, with the contract's parameters."""
    if contract.rule == LenientSpeculativeSampling.name:
        return LenientSpeculativeSampling(contract.lenience)
    if contract.rule == TypicalAcceptance.name:
        return TypicalAcceptance(contract.typical_epsilon, contract.typical_delta)
    return _BY_NAME[contract.rule]
