"""A drawn tree takes what can have been drawn, all children of a node at once, and nothing of it outlives a commit."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.acceptance import SparseRow
from outrider.core.session.contract import Contract
from outrider.core.session.digest import EMPTY, Prefix, extend
from outrider.core.tree.delta import Delta, DigestMismatch, Hints
from outrider.core.tree.sampled_tree import SampledTree, tree_of
from outrider.core.tree.token_tree import TokenTree
from outrider.errors import InvalidRequest

PROMPT = (1, 2)
ROW, OTHER = SparseRow((5, 6, 7), (1, 2, 3)), SparseRow((8, 9), (1, 1))


def delta(tree: TokenTree, **change: Any) -> Delta:
    """Two children of the root, one of the first, each parent with its row."""
    fields: dict[str, Any] = {
        "root_position": tree.root.position,
        "root_digest": tree.digest,
        "first_id": 1,
        "parents": (0, 0, 1),
        "tokens": (7, 5, 8),
        "edges": (-0.5, -1.0, -0.25),
        "drawn": (ROW, OTHER),
    }
    return Delta(**fields | change)


@pytest.mark.parametrize(("rule", "kind"), [("recursive-rejection", SampledTree), ("shared-noise", TokenTree)])
def test_the_acceptance_rule_decides_the_kind_of_tree(rule: str, kind: type[TokenTree]) -> None:
    contract, text = Contract(seed=0, max_tokens=9, rule=rule), [*range(600)]
    tree = tree_of(contract, text, capacity=7, known=Prefix(590, extend(EMPTY, text[:590])))
    assert type(tree) is kind
    assert (tree.capacity, tree.digest) == (7, extend(EMPTY, text))
    assert tree.committed.shortest_prefix.length - 1 == 590
    assert tree_of(contract, text).digest == tree.digest
    assert tree_of(contract, PROMPT).capacity == TokenTree(PROMPT).capacity == 1024


def test_children_carry_the_distribution_that_they_were_drawn_from() -> None:
    tree = SampledTree(PROMPT)
    grafted = tree.graft(3, delta(tree), lambda edge: edge / 2)
    assert [node.token for node in grafted.added] == [7, 5, 8]
    assert grafted.dropped == []
    seven = tree.root.children[7]
    assert (tree.root.q, seven.q, tree.root.children[5].q) == (ROW, OTHER, None)
    assert [node.edge for node in grafted.added] == [-0.25, -0.5, -0.125]
    assert [node.claim for node in grafted.added] == [(3, -0.5), (3, -1.0), (3, -0.25)]
    assert tree.ids.node(3, 3) is seven.children[8]
    assert tree.ids.of(3).last_id == 3
    assert tree.graft(3, delta(tree, parents=(3,), tokens=(9,), edges=(0.0,), drawn=(OTHER,), first_id=4)).added
    tree.check_integrity()


@pytest.mark.parametrize("first_id", [1, 3])
def test_ids_that_were_sent_before_change_nothing(first_id: int) -> None:
    tree = SampledTree(PROMPT)
    tree.graft(3, delta(tree))
    assert tree.graft(3, delta(tree, first_id=first_id)) == ([], [])
    assert (tree.size, tree.ids.of(3).last_id) == (3, 3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"parents": (0, 0, 9)}, "parents: node 3 names parent 9, which is not there"),
        ({"drawn": (ROW,)}, "drawn: node 3 cannot have been drawn from its parent's distribution"),
        ({"tokens": (7, 5, 7)}, "drawn: node 3 cannot have been drawn from its parent's distribution"),
        ({"tokens": (7, 7, 8)}, "drawn: node 2 cannot have been drawn from its parent's distribution"),
        ({"drawn": (ROW, OTHER, ROW)}, "drawn: has more rows than the delta's nodes have parents"),
    ],
)
def test_an_impossible_draw_is_refused_with_the_reason(change: dict[str, Any], problem: str) -> None:
    tree = SampledTree(PROMPT)
    with pytest.raises(InvalidRequest) as refusal:
        tree.graft(3, delta(tree, **change))
    assert str(refusal.value) == problem


def test_nodes_without_an_edge_are_a_fault_of_ours_and_not_cut_off() -> None:
    tree = SampledTree(PROMPT)
    with pytest.raises(ValueError, match="shorter"):
        tree.graft(3, delta(tree, edges=(-0.5, -1.0)))


def test_further_children_of_a_node_are_refused() -> None:
    tree = SampledTree(PROMPT)
    tree.graft(3, delta(tree))
    with pytest.raises(InvalidRequest) as refusal:
        tree.graft(3, delta(tree, first_id=4, parents=(1,), tokens=(9,), edges=(0.0,), drawn=(OTHER,)))
    assert str(refusal.value) == "parents: node 1 gets more children; they must come at once"


def test_a_tree_is_filled_to_its_capacity_and_no_further() -> None:
    tree = SampledTree(PROMPT, capacity=3)
    assert len(tree.graft(3, delta(tree)).added) == 3
    tree = SampledTree(PROMPT, capacity=2)
    with pytest.raises(InvalidRequest) as refusal:
        tree.graft(3, delta(tree))
    assert str(refusal.value) == "tokens: the tree is full; it holds 2 nodes"


def test_a_draw_under_another_root_is_ignored_and_uses_up_its_ids() -> None:
    tree = SampledTree(PROMPT)
    late = delta(tree)
    tree.commit([4])
    assert tree.graft(3, late) == ([], [])
    assert (tree.size, tree.ids.of(3).last_id) == (0, 3)
    with pytest.raises(DigestMismatch):
        tree.graft(3, delta(tree, root_digest=0, first_id=9))


def test_hints_are_not_taken() -> None:
    tree = SampledTree(PROMPT)
    tree.hint(Hints(tree.root.position, (-1,), (5,), (-0.5,)))
    assert tree.size == 0


def test_a_commit_returns_its_path_and_leaves_nothing_to_draw_on() -> None:
    tree = SampledTree(PROMPT)
    first, _, below = tree.graft(3, delta(tree)).added
    assert tree.commit([7]) == [first]
    assert (tree.size, tree.root.children, tree.root.q) == (0, {}, None)
    assert tree.ids.node(3, 3) is None
    assert not tree.holds(below)
    assert len(tree.graft(3, delta(tree, first_id=4, parents=(0, 0, 4))).added) == 3
    tree.check_integrity()
