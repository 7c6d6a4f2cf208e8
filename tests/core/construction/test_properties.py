"""What holds for every construction, whatever the draft proposes and wherever the tree was re-rooted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import DrafterConfig
from outrider.core.construction import (
    CONSTRUCTIONS,
    Sequoia,
    StaticConstruction,
    TreeTerms,
    construction_of,
    static_construction_of,
)
from outrider.core.session.contract import Plan
from outrider.core.tree.token_tree import TokenTree
from outrider.errors import ConfigError
from tests.core.construction.rows import Draft

every = pytest.mark.parametrize("name", CONSTRUCTIONS)
plans = st.builds(Plan, depth=st.integers(0, 6), width=st.integers(0, 5), nodes=st.integers(0, 20))


@every
@given(plan=plans, seed=st.integers(0, 99), limit=st.integers(1, 9), commits=st.lists(st.integers(0, 9), max_size=3))
def test_a_tree_keeps_to_its_plan_and_has_parents_before_children(
    name: str, plan: Plan, seed: int, limit: int, commits: list[int]
) -> None:
    draft, tree = Draft(7, seed), TokenTree([1])
    rates = (0.7, 0.3, 0.1, 0.1, 0.1)
    construction = construction_of(name)
    for along in [*commits, 0]:
        paths = draft.grown(construction, TreeTerms(plan, limit=limit, rates=rates), tree)
        assert len(paths) <= plan.nodes
        assert max(map(len, paths), default=0) <= plan.depth
        assert all(len(path) == 1 or path[:-1] in paths[:at] for at, path in enumerate(paths))
        assert all(len(expanded) <= limit for expanded in draft.passes)
        children = [sum(path[:-1] == parent for path in paths) for parent in [(), *paths]]
        assert max(children) <= construction.width(plan)
        if isinstance(construction, StaticConstruction):
            sent = sum(bool(node.names) for level in tree.levels() for node in level)
            assert commits or sent == len(paths)
        tree.commit([*next((path for path in paths if len(path) == along), ()), 3])


@every
def test_a_complete_tree_stays_unchanged(name: str) -> None:
    draft, tree = Draft(7, 5), TokenTree([1])
    terms = TreeTerms(Plan(depth=4, width=3, nodes=9), limit=4, rates=(0.6, 0.2, 0.1))
    paths = draft.grown(construction_of(name), terms, tree)
    asked = len(draft.passes)
    assert paths
    assert draft.grown(construction_of(name), terms, tree) == paths
    assert len(draft.passes) == asked


def test_a_name_that_does_not_exist_is_refused_with_the_names_that_do() -> None:
    with pytest.raises(ConfigError, match="best-first, opt-tree"):
        construction_of("bonsai")
    for name in CONSTRUCTIONS:
        assert DrafterConfig(model=".", tree=name).tree == name
        assert construction_of(name).name == name
    with pytest.raises(ValueError, match="tree"):
        DrafterConfig(model=".", tree="bonsai")


def test_sequoia_replaces_constructions_whose_shape_depends_on_values() -> None:
    assert [static_construction_of(name).name for name in CONSTRUCTIONS] == ["sequoia"] * 3 + [
        "chain",
        "k-ary",
        "sequoia",
    ]
    assert isinstance(static_construction_of("eagle-2"), Sequoia)
