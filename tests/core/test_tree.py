"""Two copies of a token tree stay consistent, whatever is late, doubled, dropped or merged."""

import math
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outrider.core.digest import EMPTY, NOTHING, Prefix, extend
from outrider.core.edges import edge_code, edge_from_code
from outrider.core.tree import ALIAS_SPAN, Delta, Drifted, Node, TokenTree, settled
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
        tree.name(node, OWN, identity)
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
    assert tree.length == 3
    tree.check_integrity()


def test_late_children_of_a_committed_node_are_still_good() -> None:
    sender, receiver = TokenTree([1]), TokenTree([1])
    receiver.graft(1, chain(sender, [5, 6], 1))
    node = sender.node(OWN, 2)
    assert node is not None
    child = sender.add(node, 7, -0.25)
    sender.name(child, OWN, 3)
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


def test_a_late_node_that_was_decided_otherwise_is_dead_and_so_are_its_descendants() -> None:
    sender, receiver = TokenTree([1]), TokenTree([1])
    late = chain(sender, [5, 6, 7], 1)
    receiver.commit([5, 9])
    assert receiver.graft(1, late) == ([], [])
    node = sender.node(OWN, 3)
    assert node is not None
    child = sender.add(node, 4, -0.5)
    sender.name(child, OWN, 4)
    assert receiver.graft(1, delta_for(sender, [child], 4)) == ([], [])
    assert receiver.size == 0


def test_an_unknown_parent_is_reported_and_so_is_a_node_beyond_the_capacity() -> None:
    receiver = TokenTree([1], capacity=2)
    digest = receiver.digest
    assert receiver.graft(1, Delta(0, digest, 5, (3,), (9,), (0.0,))).dropped == [(1, 5)]
    grafted = receiver.graft(1, Delta(0, digest, 6, (0, 6, 7), (1, 2, 3), (0.0, 0.0, 0.0)))
    assert (len(grafted.added), grafted.dropped) == (2, [(1, 8)])
    receiver.check_integrity()


def test_a_full_tree_gives_up_its_worst_leaf_for_a_better_node_and_says_so_to_whoever_sent_it() -> None:
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
    receiver.forget(2)
    receiver.check_integrity()
    assert set(paths(receiver)) == {(6,), (6, 7)}


def test_a_root_with_another_history_is_drift_and_one_ahead_is_a_fault() -> None:
    tree = TokenTree([1, 2])
    with pytest.raises(Drifted):
        tree.graft(1, Delta(1, tree.digest ^ 1, 1, (0,), (3,), (0.0,)))
    with pytest.raises(InvalidRequest, match="root_position"):
        tree.graft(1, Delta(2, tree.digest, 1, (0,), (3,), (0.0,)))
    with pytest.raises(InvalidRequest, match="parents"):
        tree.graft(1, Delta(1, tree.digest, 4, (4,), (3,), (0.0,)))


def test_aliases_expire_and_the_books_stay_bounded() -> None:
    sender, receiver = TokenTree([1]), TokenTree([1])
    receiver.graft(1, chain(sender, [5], 1))
    receiver.commit([5])
    for step in range(2 * ALIAS_SPAN):
        receiver.commit([step % 7])
    receiver.check_integrity()
    assert len(receiver._tokens) == len(receiver._digests) == ALIAS_SPAN + 1
    assert receiver.digest == extend(EMPTY, [1, 5, *(step % 7 for step in range(2 * ALIAS_SPAN))])
    old = Delta(1, extend(EMPTY, [1, 5]), 2, (1,), (0,), (0.0,))
    assert not receiver.graft(1, old).added


def test_an_empty_session_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tokens"):
        TokenTree([])


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
                self.lower.name(child, OWN, self.next_id + len(added))
                added.append(child)
        if added:
            self.deltas.append(delta_for(self.lower, added, self.next_id))
            self.next_id += len(added)

    @rule(twice=st.booleans())
    def deliver_delta(self, twice: bool) -> None:
        if self.deltas:
            delta = self.deltas.pop(0)
            for _, identity in self.upper.graft(7, delta).dropped:
                dropped = self.lower.node(OWN, identity)
                if dropped is not None:
                    self.lower.remove(dropped)
            if twice:
                assert self.upper.graft(7, delta) == ([], [])

    @rule(other=st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def graft_of_another_drafter(self, other: list[int]) -> None:
        last = self.upper.last_id(9)
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


TwoCopies.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTwoCopies = TwoCopies.TestCase


@given(st.integers(1, 3 * ALIAS_SPAN), st.lists(st.integers(1, ALIAS_SPAN), max_size=4), st.integers(0, 40))
def test_a_tree_that_is_given_the_digest_of_a_part_is_the_same(length: int, cuts: list[int], later: int) -> None:
    """However the part came: at once, piece by piece as parts of a snapshot do, or from another tree."""
    text = [(7 * at + at // 5) % 90 for at in range(length + later)]
    known = NOTHING
    for end in (*accumulate(cuts), length):
        if end <= length:
            known = settled(text[:end], known)
    assert known == settled(text[:length]) == Prefix(known.length, extend(EMPTY, text[: known.length]))
    plain, given_it = TokenTree(text[:length]), TokenTree(text[:length], known=known)
    assert given_it.digest == plain.digest == extend(EMPTY, text[:length])
    assert (given_it._tokens, given_it._digests) == (plain._tokens, plain._digests)
    for token in text[length:]:
        given_it.commit([token])
    again = TokenTree(text, known=given_it.known)
    assert again.digest == extend(EMPTY, text)
    assert again.root.position == len(text) - 1
