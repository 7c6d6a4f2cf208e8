"""Two copies of a token tree stay consistent, whatever is late, doubled, dropped or merged."""

import itertools
import math
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outrider.core.session.digest import EMPTY, NOTHING, Prefix, extend
from outrider.core.tree.committed_window import ALIAS_SPAN, settled_prefix
from outrider.core.tree.delta import Delta, DigestMismatch, Hints
from outrider.core.tree.node import Node
from outrider.core.tree.score_codec import edge_code, edge_from_code
from outrider.core.tree.token_tree import TokenTree
from outrider.errors import InvalidRequest

OWN = 0


def delta_for(tree: TokenTree, nodes: list[Node], first_id: int) -> Delta:
    """The delta that announces `nodes`, which this tree names OWN."""
    return Delta(
        tree.root.position,
        tree.digest,
        first_id,
        tuple(0 if node.parent is tree.root else node.parent.names[0][1] for node in nodes),
        tuple(node.token for node in nodes),
        tuple(node.edge for node in nodes),
    )


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """Every path of the tree and its score."""
    found = {}
    stack: list[tuple[tuple[int, ...], Node]] = [((), tree.root)]
    while stack:
        path, node = stack.pop()
        for token, child in node.children.items():
            found[*path, token] = tree.score(child)
            stack.append(((*path, token), child))
    return found


def chain(tree: TokenTree, tokens: list[int], first_id: int, edge: float = -0.5) -> Delta:
    """A chain below the root, in a delta."""
    nodes = []
    node = tree.root
    for identity, token in enumerate(tokens, first_id):
        node = tree.add(node, token, edge)
        tree.ids.name(node, OWN, identity)
        nodes.append(node)
    return delta_for(tree, nodes, first_id)


def test_the_path_score_is_the_product_of_the_edges() -> None:
    tree = TokenTree([1])
    a = tree.add(tree.root, 5, math.log(0.5))
    b = tree.add(a, 6, math.log(0.25))
    assert tree.score(b) == pytest.approx(0.125)
    tree.commit([5])
    assert tree.score(b) == pytest.approx(0.25)
    assert [node for _, node in tree.best_first(depth=9, width=9)] == [b]


def test_a_commit_off_the_tree_leaves_an_empty_one() -> None:
    tree = TokenTree([1])
    tree.graft(3, chain(TokenTree([1]), [5, 6, 7], 1))
    assert [node.token for node in tree.commit([5, 9])] == [5]
    assert tree.size == 0
    assert tree.root.token == 9
    assert tree.committed.last == 2
    tree.check_integrity()


def test_late_children_of_a_committed_node_are_still_good() -> None:
    sender, receiver = TokenTree([1]), TokenTree([1])
    receiver.graft(1, chain(sender, [5, 6], 1))
    node = sender.ids.node(OWN, 2)
    assert node is not None
    child = sender.add(node, 7, -0.25)
    sender.ids.name(child, OWN, 3)
    late = delta_for(sender, [child], 3)
    receiver.commit([5, 6])
    assert len(receiver.graft(1, late).added) == 1
    assert set(paths(receiver)) == {(7,)}


def test_a_late_node_that_was_committed_meanwhile_becomes_an_alias() -> None:
    sender, receiver = TokenTree([1]), TokenTree([1])
    late = chain(sender, [5, 6, 7, 8], 1)
    receiver.commit([5, 6])
    grafted = receiver.graft(1, late)
    assert (len(grafted.added), grafted.dropped) == (2, [])
    assert set(paths(receiver)) == {(7,), (7, 8)}


def test_a_late_node_off_the_committed_path_is_dead_with_its_descendants() -> None:
    sender, receiver = TokenTree([1]), TokenTree([1])
    late = chain(sender, [5, 6, 7], 1)
    receiver.commit([5, 9])
    assert receiver.graft(1, late) == ([], [])
    node = sender.ids.node(OWN, 3)
    assert node is not None
    child = sender.add(node, 4, -0.5)
    sender.ids.name(child, OWN, 4)
    assert receiver.graft(1, delta_for(sender, [child], 4)) == ([], [])
    assert receiver.size == 0
    receiver.commit([3])
    assert receiver.graft(1, Delta(receiver.root.position, receiver.digest, 5, (4,), (1,), (0.0,))) == ([], [])


def test_a_node_with_an_unknown_parent_or_beyond_the_capacity_is_reported() -> None:
    receiver = TokenTree([1], capacity=2)
    digest = receiver.digest
    assert receiver.graft(1, Delta(0, digest, 5, (3,), (9,), (0.0,))).dropped == [(1, 5)]
    grafted = receiver.graft(1, Delta(0, digest, 6, (0, 6, 7), (1, 2, 3), (0.0, 0.0, 0.0)))
    assert (len(grafted.added), grafted.dropped) == (2, [(1, 8)])
    receiver.check_integrity()


def test_a_full_tree_drops_its_worst_leaf_for_a_better_node_and_reports_it_to_the_sender() -> None:
    receiver = TokenTree([1], capacity=3)
    digest = receiver.digest
    receiver.graft(1, Delta(0, digest, 1, (0, 1, 0), (5, 6, 7), (-0.5, -0.5, -3.0)))
    better = receiver.graft(2, Delta(0, digest, 1, (0,), (8,), (-1.0,)))
    assert (len(better.added), better.dropped) == (1, [(1, 3)])
    assert set(paths(receiver)) == {(5,), (5, 6), (8,)}
    worse = receiver.graft(2, Delta(0, digest, 2, (0,), (9,), (-2.0,)))
    assert (worse.added, worse.dropped) == ([], [(2, 2)])
    receiver.check_integrity()


def test_a_replayed_delta_changes_nothing() -> None:
    receiver = TokenTree([1])
    delta = chain(TokenTree([1]), [5, 6], 1)
    receiver.graft(1, delta)
    before = paths(receiver)
    assert receiver.graft(1, delta) == ([], [])
    assert paths(receiver) == before
    partly = Delta(0, receiver.digest, 2, (1, 2), (6, 7), (-0.5, -0.5))  # its first node is known
    assert [node.token for node in receiver.graft(1, partly).added] == [7]
    receiver.remove(receiver.root.children[5].children[6].children[7])
    assert [node.names for level in receiver.levels() for node in level] == [[(1, 1)], [(1, 2)]]
    receiver.commit([7])
    assert receiver.graft(1, delta) == ([], [])  # they are dead
    assert paths(receiver) == {}


def test_two_drafters_merge_by_path_and_the_larger_score_stays() -> None:
    receiver = TokenTree([1])
    receiver.graft(1, chain(TokenTree([1]), [5, 6], 1, edge=-1.0))
    grafted = receiver.graft(2, chain(TokenTree([1]), [5, 6, 7], 10, edge=-0.5))
    assert len(grafted.added) == 1
    assert paths(receiver)[5, 6] == pytest.approx(math.exp(-1.0))
    receiver.check_integrity()
    receiver.commit([5])
    receiver.ids.forget(2)
    receiver.check_integrity()
    assert set(paths(receiver)) == {(6,), (6, 7)}


def test_a_root_with_another_history_is_drift_and_one_ahead_is_a_fault() -> None:
    tree = TokenTree([1, 2])
    with pytest.raises(DigestMismatch):
        tree.graft(1, Delta(1, tree.digest ^ 1, 1, (0,), (3,), (0.0,)))
    with pytest.raises(InvalidRequest, match="root_position"):
        tree.graft(1, Delta(2, tree.digest, 1, (0,), (3,), (0.0,)))
    with pytest.raises(InvalidRequest, match="parents"):
        tree.graft(1, Delta(1, tree.digest, 4, (4,), (3,), (0.0,)))


def test_aliases_expire_and_the_records_of_committed_nodes_stay_bounded() -> None:
    sender, receiver = TokenTree([1]), TokenTree([1])
    receiver.graft(1, chain(sender, [5], 1))
    receiver.commit([5])
    for step in range(2 * ALIAS_SPAN):
        receiver.commit([step % 7])
    receiver.check_integrity()
    assert len(receiver.committed) == ALIAS_SPAN + 1
    receiver.committed.check_root(1, 7)  # no digest is kept that far behind
    with pytest.raises(DigestMismatch):
        receiver.committed.check_root(receiver.committed.last, 7)
    assert receiver.digest == extend(EMPTY, [1, 5, *(step % 7 for step in range(2 * ALIAS_SPAN))])
    old = Delta(1, extend(EMPTY, [1, 5]), 2, (1,), (0,), (0.0,))
    assert not receiver.graft(1, old).added


@pytest.mark.parametrize("sender", [1, 10_000])
def test_a_late_node_may_follow_a_commit_up_to_the_alias_span_and_no_older_one(sender: int) -> None:
    for age, added in ((ALIAS_SPAN, 1), (ALIAS_SPAN + 1, 0)):
        tree = TokenTree([1])
        tree.graft(sender, chain(TokenTree([1]), [5], 1))
        tree.commit([5])
        text = [step % 7 for step in range(age)]
        for token in text:
            tree.commit([token])
        count = len(text) + 1  # the committed tokens since then, and a new one
        late = Delta(tree.root.position, tree.digest, 2, tuple(range(1, count + 1)), (*text, 99), (-0.5,) * count)
        assert len(tree.graft(sender, late).added) == added
        tree.check_integrity()


def test_commits_of_a_forgotten_drafter_expire_when_it_returns() -> None:
    tree = TokenTree([1])
    tree.graft(1, chain(TokenTree([1]), [5], 1))
    tree.commit([5])
    tree.ids.forget(1)
    tree.graft(1, Delta(tree.root.position, tree.digest, 1, (0,), (6,), (-0.5,)))
    for _ in range(ALIAS_SPAN + 1):
        tree.commit([7])
    assert not tree.ids._aliases
    tree.check_integrity()


def test_a_session_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        TokenTree([])
    assert str(refusal.value) == "tokens: a session needs at least one token before it can be continued"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"root_position": 2}, "root_position: is 2, must be 0 to 1, the last committed"),
        ({"root_position": -1}, "root_position: is -1, must be 0 to 1, the last committed"),
        ({"parents": (0, 5)}, "parents: node 5 names parent 5, which is not older"),
        ({"parents": (-1, 0)}, "parents: node 4 names parent -1, which is not older"),
        ({"rescored": ((6, -0.5),), "version": 1}, "rescored: names node 6, which was not sent"),
    ],
)
def test_a_delta_that_contradicts_itself_is_refused_with_the_reason(change: dict[str, Any], problem: str) -> None:
    tree = TokenTree([1, 2])
    fields: dict[str, Any] = {"root_position": 1, "parents": (0, 4), "tokens": (3, 3), "edges": (0.0, 0.0)}
    with pytest.raises(InvalidRequest) as refusal:
        tree.graft(1, Delta(root_digest=tree.digest, first_id=4, **fields | change))
    assert str(refusal.value) == problem


def test_nodes_without_a_token_or_an_edge_are_a_fault_of_ours_and_not_cut_off() -> None:
    tree = TokenTree([1])
    with pytest.raises(ValueError, match="shorter"):
        tree.hint(Hints(0, (-1, -1), (5, 6), (-0.5,)))
    with pytest.raises(ValueError, match="shorter"):
        tree.graft(1, Delta(0, tree.digest, 1, (0, 0), (5, 6), (-0.5,)))


def test_the_error_of_drift_names_the_position() -> None:
    with pytest.raises(DigestMismatch, match=r"^at position 1$"):
        TokenTree([1, 2]).graft(1, Delta(1, 0, 1, (), (), ()))


def test_a_new_node_has_its_depth_and_path_and_no_judgement() -> None:
    tree = TokenTree([1, 2])
    low = tree.add(tree.add(tree.root, 5, -1.0), 6, -0.5)
    assert (tree.path(low), tree.depth(low), tree.depth(tree.root), tree.committed.last) == ([5, 6], 2, 0, 1)
    assert (tree.root.token, tree.root.position) == (2, 1)
    assert (low.row, low.claim, low.q, low.expanded, low.rescored) == (-1, None, None, False, False)
    assert [node.token for node in low.ancestors(tree.root)] == [6, 5]
    assert tree.score(tree.root) == 1.0


def test_a_node_is_held_until_its_path_is_removed_or_rejected() -> None:
    tree = TokenTree([1])
    high = tree.add(tree.root, 5, -1.0)
    low = tree.add(high, 6, -0.5)
    other = tree.add(tree.root, 7, -0.5)
    root = tree.root
    assert all(map(tree.holds, (root, high, low, other)))
    tree.remove(high)
    assert tree.size == 1
    assert [tree.holds(node) for node in (high, low, other)] == [False, False, True]
    assert not tree.holds(Node(7, 1, tree.root, -0.5))  # another of that token
    tree.commit([7])
    assert [tree.holds(node) for node in (root, other)] == [False, True]
    tree.commit([8])
    assert not tree.holds(other)


def test_levels_are_siblings_side_by_side() -> None:
    tree = TokenTree([1])
    for token in (5, 6):
        node = tree.add(tree.root, token, -1.0)
        for below in (7, 8):
            tree.add(node, below, -1.0)
    assert [[node.token for node in level] for level in tree.levels()] == [[5, 6], [7, 8, 7, 8]]


def test_the_first_of_equally_scored_nodes_is_the_better() -> None:
    tree = TokenTree([1])
    for token in (9, 3, 6):
        tree.add(tree.root, token, -1.0)
    assert [node.token for _, node in tree.best_first(depth=1, width=3)] == [9, 3, 6]
    assert [node.token for _, node in tree.best_first(depth=1, width=2)] == [9, 3]
    assert [score for score, _ in tree.best_first(depth=1, width=1)] == [pytest.approx(math.exp(-1.0))]


def test_a_child_added_again_keeps_its_larger_edge_as_do_its_descendants() -> None:
    tree = TokenTree([1])
    high = tree.add(tree.root, 5, -1.0)
    low = tree.add(high, 6, -0.5)
    assert tree.add(tree.root, 5, -2.0) is high
    assert high.edge == -1.0
    assert tree.add(tree.root, 5, -0.25) is high
    assert (high.edge, low.log_score, tree.size) == (-0.25, -0.75, 2)
    tree.check_integrity()


def test_a_drafters_score_counts_as_its_calibration_corrects_it() -> None:
    tree = TokenTree([1])
    grafted = tree.graft(4, chain(TokenTree([1]), [5, 6], 1), lambda edge: 2 * edge, origin=8)
    assert [(node.edge, node.claim) for node in grafted.added] == [(-1.0, (4, -0.5))] * 2
    assert tree.claimants() == {4}
    tree.graft(3, chain(TokenTree([1]), [5], 1, edge=-2.0))
    assert grafted.added[0].claim == (4, -0.5)  # the larger one's
    tree.graft(3, chain(TokenTree([1]), [5, 7], 2, edge=-0.25))
    assert grafted.added[0].claim == (3, -0.25)
    assert tree.claimants() == {3, 4}
    assert tree.ids.origins(grafted.added[0]) == {8, 3}
    for node in grafted.added:
        tree.rescore(node, -1.0)
    tree.graft(4, Delta(0, tree.digest, 3, (), (), (), rescored=((2, -0.125),), version=1), lambda edge: 2 * edge)
    assert (grafted.added[1].edge, grafted.added[1].claim) == (-0.25, (4, -0.125))
    tree.commit([9])
    assert not tree.ids.of(4).origins


def test_below_a_node_that_the_tree_s_own_model_has_expanded_its_judgement_stands() -> None:
    tree = TokenTree([1])
    own = tree.add(tree.root, 5, -2.0)
    tree.root.expanded = True
    assert tree.graft(4, chain(TokenTree([1]), [5], 1)).added == [own]
    assert (own.edge, own.claim, own.names) == (-2.0, None, [(4, 1)])
    new = tree.graft(4, chain(TokenTree([1]), [6], 2)).added[0]
    assert (new.edge, new.claim) == (-0.5, (4, -0.5))


def test_a_full_tree_drops_no_leaf_for_a_node_that_is_not_better_or_its_own_child() -> None:
    tree = TokenTree([1], capacity=1)
    tree.graft(1, chain(TokenTree([1]), [5], 1, edge=-1.0))
    assert tree.graft(2, chain(TokenTree([1]), [6], 1, edge=-1.0)) == ([], [(2, 1)])
    assert tree.graft(3, Delta(0, tree.digest, 1, (0, 1), (5, 6), (-1.0, 0.0))) == ([], [(3, 2)])
    assert set(paths(tree)) == {(5,)}
    better = tree.graft(4, chain(TokenTree([1]), [7], 1, edge=-0.5))
    assert [node.token for node in better.added] == [7]
    assert sorted(better.dropped) == [(1, 1), (3, 1)]  # all that had sent it
    tree.check_integrity()


def test_a_full_tree_drops_a_leaf_before_an_equally_likely_ancestor() -> None:
    tree = TokenTree([1], capacity=2)
    tree.graft(1, Delta(0, tree.digest, 1, (0, 1), (5, 6), (-1.0, 0.0)))
    assert tree.graft(2, chain(TokenTree([1]), [7], 1, edge=-0.5)).dropped == [(1, 2)]
    assert set(paths(tree)) == {(5,), (7,)}
    tree.check_integrity()


def test_an_inconsistent_tree_fails_its_integrity_check() -> None:
    def tree() -> TokenTree:
        made = TokenTree([1])
        made.graft(1, chain(TokenTree([1]), [5, 6], 1))
        made.check_integrity()
        return made

    for attribute, wrong in (("log_score", -0.6), ("position", 5), ("token", 7), ("parent", None)):
        broken = tree()
        setattr(broken.root.children[5].children[6], attribute, wrong)
        with pytest.raises(AssertionError):
            broken.check_integrity()
    broken = tree()
    broken.size += 1
    with pytest.raises(AssertionError):
        broken.check_integrity()
    broken = tree()
    broken.ids.of(1).nodes[2] = broken.root
    with pytest.raises(AssertionError):
        broken.check_integrity()
    broken = tree()
    broken.ids.of(1).nodes[3] = Node(9, 1, None, 0.0)
    with pytest.raises(AssertionError):
        broken.check_integrity()
    broken = tree()
    broken.ids.of(1).committed[9] = 1
    with pytest.raises(AssertionError):
        broken.check_integrity()


def test_a_forgotten_drafter_may_begin_its_ids_again() -> None:
    tree = TokenTree([1])
    tree.graft(1, chain(TokenTree([1]), [5], 1))
    tree.graft(2, chain(TokenTree([1]), [5], 1))
    tree.ids.forget(1)
    tree.ids.forget(7)  # no drafter has this number
    five = tree.root.children[5]
    assert (five.names, tree.ids.of(1).last_id, tree.ids.node(1, 1)) == ([(2, 1)], 0, None)
    assert len(tree.graft(1, chain(TokenTree([1]), [6], 1)).added) == 1


@pytest.mark.parametrize("length", [ALIAS_SPAN + 1, ALIAS_SPAN + 2, 1000])
def test_a_tree_looks_at_as_many_tokens_as_late_nodes_may_turn_out_to_be(length: int) -> None:
    text = [*range(length)]
    assert settled_prefix(text).length == length - ALIAS_SPAN - 1
    committed, first = TokenTree(text).committed, length - ALIAS_SPAN - 1
    assert [committed.token(at) for at in range(length + 1)] == [*[None] * first, *range(first, length), None]


@given(st.floats(-30, 0))
def test_an_edge_survives_the_wire_within_its_resolution(edge: float) -> None:
    code = edge_code(edge)
    assert 0 <= code <= 255
    assert edge_code(edge_from_code(code)) == code
    assert abs(edge_from_code(code) - max(edge, -255 / 16)) <= 1 / 32


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5), st.integers(0, 60)), max_size=60), st.data())
def test_best_first_is_the_best_tree_of_every_size(nodes: list[tuple[int, int, int]], data: st.DataObject) -> None:
    tree = TokenTree([0])
    known = [tree.root]
    for parent, token, code in nodes:
        known.append(tree.add(known[parent % len(known)], token, edge_from_code(code)))
    ranked = list(tree.best_first(depth=100, width=100))
    assert len(ranked) == tree.size
    assert [score for score, _ in ranked] == sorted((score for score, _ in ranked), reverse=True)
    assert sorted(paths(tree).values(), reverse=True) == pytest.approx([score for score, _ in ranked])
    taken = {tree.root}
    for _, node in ranked:
        assert node.parent in taken
        taken.add(node)
    depth = data.draw(st.integers(0, 4))
    width = data.draw(st.integers(1, 3))
    limited = [node for _, node in tree.best_first(depth=depth, width=width)]
    assert all(tree.depth(node) <= depth for node in limited)
    for node in limited:
        assert sum(child in limited for child in node.children.values()) <= width


CHANGES = st.tuples(st.sampled_from(["add", "rescore", "remove", "commit"]), st.integers(0, 30), st.integers(0, 3))


@settings(max_examples=100)
@given(st.lists(CHANGES, max_size=40), st.data())
def test_the_best_nodes_follow_every_change_of_the_tree(
    changes: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    tree, terms = TokenTree([0]), st.tuples(st.integers(0, 9), st.integers(1, 3), st.integers(1, 3))
    for number, (change, place, token) in enumerate(changes):
        nodes = [node for level in tree.levels() for node in level]
        if change == "commit":
            tree.commit([token])
        elif change == "add" or not nodes:
            above = [tree.root, *nodes]
            tree.add(above[place % len(above)], token, -0.3 * (number % 7))
        elif change == "rescore":
            tree.rescore(nodes[place % len(nodes)], -0.2 * token)
        else:
            tree.remove(nodes[place % len(nodes)])
        for _ in range(2):
            count, depth, width = data.draw(terms)
            expected = [*itertools.islice(tree.best_first(depth=depth, width=width), count)]
            assert tree.best(count, depth=depth, width=width) == expected


class TwoCopies(RuleBasedStateMachine):
    """A drafter's tree and its upstream's, with deltas and commits under way both ways, doubled and delayed."""

    def __init__(self) -> None:
        super().__init__()
        self.upper = TokenTree([1], capacity=40)
        self.lower = TokenTree([1])
        self.committed = [1]
        self.next_id = 1
        self.deltas: list[Delta] = []
        self.commits: list[list[int]] = []

    @rule(parent=st.integers(0, 50), tokens=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
    def draft(self, parent: int, tokens: list[int]) -> None:
        known = [self.lower.root, *(node for _, node in self.lower.best_first(depth=8, width=8))]
        node = known[parent % len(known)]
        added = []
        for token in tokens:
            if token not in node.children and self.lower.size < 60:
                child = self.lower.add(node, token, edge_from_code(token * 8))
                self.lower.ids.name(child, OWN, self.next_id + len(added))
                added.append(child)
        if added:
            self.deltas.append(delta_for(self.lower, added, self.next_id))
            self.next_id += len(added)

    @rule(twice=st.booleans())
    def deliver_delta(self, twice: bool) -> None:
        if self.deltas:
            delta = self.deltas.pop(0)
            for _, identity in self.upper.graft(7, delta).dropped:
                dropped = self.lower.ids.node(OWN, identity)
                if dropped is not None:
                    self.lower.remove(dropped)
            if twice:
                assert self.upper.graft(7, delta) == ([], [])

    @rule(other=st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def graft_of_another_drafter(self, other: list[int]) -> None:
        last = self.upper.ids.of(9).last_id
        copy = TokenTree(self.committed)
        self.upper.graft(9, chain(copy, other, last + 1, edge=-0.75))

    @rule(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def commit(self, tokens: list[int]) -> None:
        before = paths(self.upper)
        self.upper.commit(tokens)
        assert set(paths(self.upper)) == {
            path[len(tokens) :] for path in before if path[: len(tokens)] == tuple(tokens)
        } - {()}
        self.committed += tokens
        self.commits.append(tokens)

    @rule()
    def deliver_commit(self) -> None:
        if self.commits:
            self.lower.commit(self.commits.pop(0))

    @invariant()
    def books_are_right(self) -> None:
        self.upper.check_integrity()
        self.lower.check_integrity()
        assert self.upper.size <= 40 + 3

    def teardown(self) -> None:
        """When all has arrived, the upstream has every node of the drafter's tree that it did not drop."""
        while self.commits:
            self.deliver_commit()
        while self.deltas:
            self.deliver_delta(False)
        assert self.upper.digest == self.lower.digest == extend(EMPTY, self.committed)
        assert set(paths(self.lower)) <= set(paths(self.upper))
        self.books_are_right()


TwoCopies.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestTwoCopies = TwoCopies.TestCase


@given(st.integers(1, 3 * ALIAS_SPAN), st.lists(st.integers(1, ALIAS_SPAN), max_size=4), st.integers(0, 40))
def test_a_tree_given_a_known_prefix_digest_equals_a_fresh_one(length: int, cuts: list[int], later: int) -> None:
    """However the part came: at once, piece by piece as parts of a snapshot do, or from another tree."""
    text = [(7 * at + at // 5) % 90 for at in range(length + later)]
    known = NOTHING
    for end in (*accumulate(cuts), length):
        if end <= length:
            known = settled_prefix(text[:end], known)
    assert known == settled_prefix(text[:length]) == Prefix(known.length, extend(EMPTY, text[: known.length]))
    plain, given_it = TokenTree(text[:length]), TokenTree(text[:length], known=known)
    assert given_it.digest == plain.digest == extend(EMPTY, text[:length])
    assert vars(given_it.committed) == vars(plain.committed)
    for token in text[length:]:
        given_it.commit([token])
    again = TokenTree(text, known=given_it.committed.shortest_prefix)
    assert again.digest == extend(EMPTY, text)
    assert again.root.position == len(text) - 1
