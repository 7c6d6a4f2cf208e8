"""Drafting without a model: whatever is proposed is worth its rows, and every way is had by its name."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import LookupMethod
from outrider.core.construction.self_repetition import Repeats
from outrider.core.proposers.lookup import Lookups, fits, grow
from outrider.core.session.contract import RULES, Contract
from outrider.core.tree.token_tree import TokenTree
from outrider.errors import ConfigError

GREEDY = Contract(seed=0, max_tokens=1, temperature=0.0)

texts = st.lists(st.integers(0, 3), min_size=4, max_size=60)


@pytest.mark.parametrize("way", ["prompt-lookup", "suffix"])
@given(texts, st.integers(1, 12), st.integers(1, 6), st.integers(1, 4), st.floats(0.0, 0.5))
def test_added_nodes_keep_within_all_bounds(
    way: str, text: list[int], nodes: int, depth: int, vocabulary: int, floor: float
) -> None:
    lookup, tree = Lookups(way, None).begin("", GREEDY), TokenTree(text)
    for start in range(0, len(text), 3):
        lookup.extend(text[start : start + 3])
    bounds = {"nodes": nodes, "depth": depth, "width": 2, "vocabulary": vocabulary, "floor": floor, "room": 7}
    added = grow(tree, lookup, **bounds)
    tree.check_integrity()
    assert len(added) == tree.size <= min(nodes, 7)
    for node, claimed in added:
        assert tree.score(node) >= floor
        assert tree.depth(node) <= depth
        assert node.token < vocabulary
        assert node.edge == claimed <= 0.0
        assert len(node.children) <= 2
    assert grow(tree, lookup, **bounds) == [] or tree.size <= 2 * nodes


@given(texts)
def test_prompt_lookup_proposes_the_continuation_of_the_longest_repetition(text: list[int]) -> None:
    lookup = Lookups("prompt-lookup", None).begin("", GREEDY)
    lookup.extend(text)
    found, proposal = Repeats(text).find(5), lookup.propose(9, 5)
    assert list(proposal.tokens) == (found.tokens if found else [])
    assert proposal.parents == tuple(range(-1, len(proposal.tokens) - 1))


def test_prompt_lookup_learns_how_far_matches_can_be_trusted() -> None:
    right, wrong = Lookups("prompt-lookup", None).begin("", GREEDY), Lookups("prompt-lookup", None).begin("", GREEDY)
    for lookup, new in ((right, 0), (wrong, 1)):
        lookup.extend([1, 2, 3, 7, 9, 1, 2, 3])
        for step in range(20):
            lookup.propose(1, 1)
            lookup.extend([7 + new * step])
            lookup.extend([9, 1, 2, 3])
    assert right.propose(1, 1).chances[0] > 0.8 > 0.5 > wrong.propose(1, 1).chances[0]


def test_suffixes_share_the_outputs_of_one_tenant_and_no_other_s() -> None:
    lookups = Lookups("suffix", None)
    first = lookups.begin("one", GREEDY)
    first.extend([1, 2, 3])
    first.finish([5, 6, 7, 8, 9, 10])
    for tenant, expected in (("one", (8, 9)), ("two", ())):
        other = lookups.begin(tenant, GREEDY)
        other.extend([4, 5, 6, 7])
        assert other.propose(2, 2).tokens == expected


def test_a_drafter_is_judged_where_it_is_grafted() -> None:
    lookup, tree = Lookups("suffix", None).begin("", GREEDY), TokenTree([1, 2, 1])
    lookup.extend([1, 2, 1])
    ((node, claimed),) = grow(
        tree, lookup, nodes=1, depth=1, width=1, vocabulary=9, floor=0.0, room=9, calibrate=lambda edge: edge - 1.0
    )
    assert node.edge == pytest.approx(claimed - 1.0)
    assert tree.score(node) == pytest.approx(math.exp(claimed - 1.0))


def test_rules_that_want_a_q_are_not_for_lookups() -> None:
    taken = {rule for rule in RULES if fits(Contract(seed=0, max_tokens=1, rule=rule))}
    assert taken == {"shared-noise", "target-match", "typical-acceptance"}


def test_retrieval_needs_a_store() -> None:
    assert set(get_args(LookupMethod)) == {"prompt-lookup", "suffix", "retrieval"}
    with pytest.raises(ConfigError, match="outrider index"):
        Lookups("retrieval", None)
