"""Acceptance rules: which of the drafted tokens are said, and what is said after them.

A generation names its rule in its contract and keeps it. All but the lossy ones say what is distributed as the target's
own text; shared noise says the very text, whatever was drafted.
"""

from outrider.core.contract import Contract
from outrider.core.rules.chance import DRAFT, VERIFY, Chance, SeededChance
from outrider.core.rules.drawing import SparseRow
from outrider.core.rules.joint import BlockVerification, TraversalVerification
from outrider.core.rules.matching import SharedNoise, TargetMatch
from outrider.core.rules.rejection import LenientSpeculativeSampling, RecursiveRejection, SpeculativeSampling
from outrider.core.rules.rule import Drawn, Judge, Rows, Rule, Walk
from outrider.core.rules.typical import TypicalAcceptance

__all__ = [
    "DRAFT",
    "VERIFY",
    "Chance",
    "Drawn",
    "Judge",
    "Rows",
    "Rule",
    "SeededChance",
    "SparseRow",
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
    """The rule that a contract names, with the parameters that it gives."""
    if contract.rule == LenientSpeculativeSampling.name:
        return LenientSpeculativeSampling(contract.lenience)
    if contract.rule == TypicalAcceptance.name:
        return TypicalAcceptance(contract.typical_epsilon, contract.typical_delta)
    return _BY_NAME[contract.rule]
