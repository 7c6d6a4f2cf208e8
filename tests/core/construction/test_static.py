"""Fixed shapes: chain, k-ary, and the one that Sequoia's dynamic programme finds; depth by cost."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.construction import Chain, KAry, Sequoia, TreeTerms
from outrider.core.session.contract import Plan
from outrider.core.tree.static_trees import (
    Shape,
    best_shape,
    depth_of,
    expected_tokens,
    k_ary_shape,
    shape_by_objective,
    size_of,
)
from tests.core.acceptance.enumeration import shapes
from tests.core.construction.rows import Draft

falling = st.lists(st.floats(0.01, 0.99), min_size=1, max_size=5).map(lambda rates: sorted(rates, reverse=True))


def by_dynamic_programme(rates: list[float], nodes: int, depth: int) -> float:
    """The largest sum of path products of a tree of at most `nodes` nodes: Sequoia, section 4.1, with the
    depth bounded. `siblings` are a node's children from a rank on."""

    @cache
    def siblings(rank: int, left: int, levels: int) -> float:
        if rank == len(rates) or not left or not levels:
            return 0.0
        return max(
            rates[rank] * (1.0 + siblings(0, mine - 1, levels - 1)) + siblings(rank + 1, left - mine, levels)
            for mine in range(1, left + 1)
        )

    return siblings(0, nodes, depth)


@given(falling, st.integers(0, 14), st.integers(0, 6))
def test_the_greedy_shape_is_the_dynamic_programmes(rates: list[float], nodes: int, depth: int) -> None:
    shape = best_shape(rates, nodes=nodes, depth=depth)
    assert expected_tokens(shape, rates) == pytest.approx(by_dynamic_programme(rates, nodes, depth), abs=1e-6)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_k_ary_tree_has_k_children_everywhere_and_the_last_level_is_filled_from_the_best(k: int) -> None:
    for depth in range(4):
        whole = sum(k**level for level in range(1, depth + 1))
        shape = k_ary_shape(k, nodes=1000, depth=depth)
        assert (size_of(shape), depth_of(shape)) == (whole, depth)
    assert k_ary_shape(3, nodes=5, depth=9) == (((), ()), (), ())
    assert k_ary_shape(2, nodes=100, depth=3, expanded=1) == ((((), ()), ()), ())


def test_shapes_are_grown_with_the_best_candidates() -> None:
    draft = Draft(9, 3)
    plan = Plan(depth=4, width=3, nodes=7)
    chain = draft.grown(Chain(), TreeTerms(plan))
    assert [len(path) for path in chain] == [1, 2, 3, 4]
    assert all(path[-1] == draft.chances(path[:-1]).argmax() for path in chain)
    ternary = draft.grown(KAry(), TreeTerms(plan))
    assert sorted(map(len, ternary)) == [1, 1, 1, 2, 2, 2, 2]
    assert all(path[-1] in (-draft.chances(path[:-1])).argsort()[:3] for path in ternary)
    rates = (0.6, 0.5, 0.1)
    measured = draft.grown(Sequoia(), TreeTerms(plan, rates=rates))
    assert sorted(map(len, measured)) == levels_of(best_shape(rates, nodes=7, depth=4))


def levels_of(shape: Shape, depth: int = 1) -> list[int]:
    return sorted([depth] * len(shape) + [level for below in shape for level in levels_of(below, depth + 1)])


@given(falling, st.floats(0.0, 1.0))
def test_a_cost_per_level_makes_the_best_shape_shallower(rates: list[float], cost_tokens: float) -> None:
    terms = TreeTerms(Plan(depth=5, width=5, nodes=9), rates=tuple(rates), level_cost_tokens=cost_tokens)
    shape = Sequoia().shape(terms)
    worth = expected_tokens(shape, rates) - cost_tokens * depth_of(shape)
    for depth in range(6):
        assert worth >= by_dynamic_programme(rates, 9, depth) - cost_tokens * depth - 1e-6
    assert depth_of(shape) <= depth_of(best_shape(rates, nodes=9, depth=5))


@pytest.mark.parametrize("level_s", [0.0, 0.002, 0.02])
def test_the_chosen_shape_has_the_most_tokens_per_second_of_all(level_s: float) -> None:
    """Sequoia (Chen et al., arXiv 2402.12374), section 4.3: the hardware-aware optimizer, over sizes and depths."""
    for rates in ([0.8, 0.1], [0.5, 0.4], [0.9, 0.5]):
        for step in (0.0, 0.004):

            def goodput(shape: Shape, rates: list[float] = rates, step: float = step) -> float:
                seconds = depth_of(shape) * level_s + 0.02 + step * size_of(shape)
                return (1.0 + expected_tokens(shape, rates)) / seconds

            candidates = [
                shape_by_objective(
                    rates,
                    lambda expected, size, levels, s=step: (1.0 + expected) / (levels * level_s + 0.02 + s * size),
                    nodes=nodes,
                    depth=3,
                )
                for nodes in range(6)
            ]
            assert max(map(goodput, candidates)) == pytest.approx(max(map(goodput, shapes(2, 3, 5))))


def test_the_shallowest_of_equally_good_depths_is_chosen() -> None:
    assert shape_by_objective([0.5], lambda *_: 0.0, nodes=4, depth=4) == ()
