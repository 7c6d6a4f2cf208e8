"""All acceptance rules: a new one is a class, a line here, and its name in `RuleName`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from outrider.core.acceptance.block_verification import BlockVerification, TraversalVerification
from outrider.core.acceptance.exact_match import SharedNoise, TargetMatch
from outrider.core.acceptance.interface import Rule
from outrider.core.acceptance.rejection import LenientSpeculativeSampling, RecursiveRejection, SpeculativeSampling
from outrider.core.acceptance.typical import TypicalAcceptance
from outrider.core.session.contract import Contract

RULES: Mapping[str, Callable[[Contract], Rule]] = {  # by name: from a contract's parameters to its rule
    SharedNoise.name: lambda contract: SharedNoise(),
    TargetMatch.name: lambda contract: TargetMatch(),
    SpeculativeSampling.name: lambda contract: SpeculativeSampling(),
    RecursiveRejection.name: lambda contract: RecursiveRejection(),
    BlockVerification.name: lambda contract: BlockVerification(),
    TraversalVerification.name: lambda contract: TraversalVerification(),
    LenientSpeculativeSampling.name: lambda contract: LenientSpeculativeSampling(contract.lenience),
    TypicalAcceptance.name: lambda contract: TypicalAcceptance(contract.typical_epsilon, contract.typical_delta),
}


def rule_of(contract: Contract) -> Rule:
    """Return the rule that a contract names, with the contract's parameters."""
    return RULES[contract.rule](contract)
