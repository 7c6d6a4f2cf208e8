"""The list of acceptance rules."""

from outrider.core.acceptance import rule_of
from outrider.core.acceptance.rules import RULES
from outrider.core.session import contract
from outrider.core.session.contract import Contract


def test_each_name_that_a_contract_may_have_is_that_of_its_rule() -> None:
    assert [*RULES] == [*contract.RULES]
    assert [rule_of(Contract(seed=0, max_tokens=1, rule=name)).name for name in RULES] == [*RULES]
