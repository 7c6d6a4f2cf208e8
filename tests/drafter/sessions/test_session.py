"""A drafter's session keeps tree, cache rows and the upstream's copy in step, whatever the target commits."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_svc.sessions.topk_session import READ_AT_ONCE, TopKSession
from outrider.core.construction import construction_of
from outrider.core.construction.expansion import DrafterFits
from outrider.core.session.contract import Contract, Plan, SentTerms
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.snapshot import MirrorSnapshot
from outrider.core.tree.delta import Delta
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree
from outrider.engine.interface.logits import HostLogits, logits_rows

VOCABULARY = 12
PROMPT = (3, 1, 4, 1, 5)
TERMS = Contract(seed=4, max_tokens=100)


class Rig:
    """A session, a cache that holds tokens instead of KV, and the upstream's tree."""

    def __init__(
        self, plan: Plan, seed: int, credit: int = 400, *, ahead: bool = False, tree: str = "best-first"
    ) -> None:
        snapshot = MirrorSnapshot(PROMPT, extend(EMPTY, PROMPT), TERMS, plan, credit, SentTerms(ahead=ahead))
        self.session = TopKSession(snapshot, 0, VOCABULARY, construction_of(tree))
        self.upstream = TokenTree(PROMPT)
        self.cache = np.full(300, -1)
        self.fit = DrafterFits()
        self.largest_id = 0
        self._random = np.random.default_rng(seed)

    def level(self, limit: int = 3, context: int = 200) -> bool:
        """Runs what the session wants next. False when it wants nothing: then it sends what it held back."""
        session = self.session
        chosen = session.next_segment(self.fit, chunk=4, limit=limit, context=context, rows=300)
        if chosen is None:
            self.deliver(session.flush(self.fit))
            return False
        segment, nodes = chosen
        count = len(segment.tokens)
        span = count if segment.mask is None else segment.mask.shape[1]
        rows = range(segment.prefix + span - count, segment.prefix + span)
        self.cache[rows] = segment.tokens
        assert self.cache[: segment.prefix].tolist() == session.tokens[: segment.prefix]
        if segment.mask is not None:
            below = [node for node in nodes if node is not session.tree.root]
            pending = session.tokens[session.cached :]
            assert segment.mask[: len(pending)].sum() == len(pending) * (len(pending) + 1) // 2
            behind = slice(len(pending), None)
            for seen, node, position in zip(segment.mask[behind], below, segment.positions[behind], strict=True):
                path = [above.token for above in node.ancestors(session.tree.root)][::-1]
                visible = self.cache[segment.prefix : segment.prefix + span][seen].tolist()
                assert sorted(visible) == sorted(pending + path)
                assert position == node.position == len(session.tokens) - 1 + len(path)
        session.advance(segment, nodes)
        if nodes:
            logits = self._random.normal(0, 1.5, (len(nodes), VOCABULARY)).astype(np.float32)
            self.deliver(session.expand(nodes, logits_rows(HostLogits(logits), 0, len(nodes)), self.fit))
        return True

    def deliver(self, delta: Delta) -> None:
        if delta.tokens:
            assert delta.first_id == self.largest_id + 1
            self.largest_id += len(delta.tokens)
            assert self.largest_id <= self.session.credit
            assert self.upstream.graft(1, delta).dropped == []

    def commit(self, tokens: list[int]) -> None:
        self.upstream.commit(tokens)
        move = self.session.commit(tokens)
        if move is not None:
            self.cache[move.target] = self.cache[move.source].copy()
        self.session.learn(self.fit)
        self.deliver(self.session.refill(self.fit))
        self.check()

    def check(self) -> None:
        session = self.session
        session.tree.check_integrity()
        assert session.tree.digest == self.upstream.digest
        assert paths(session.tree) == paths(self.upstream)
        assert self.cache[: session.cached].tolist() == session.tokens[: session.cached]
        for index, node in enumerate(session.scratch):
            assert node.row == session.cached + index
            assert self.cache[node.row] == node.token
            assert node.expanded

    def play(self, moves: Sequence[int | tuple[int, int]]) -> None:
        """A number of levels, or a commit: a number of tokens along the tree, and one."""
        for move in moves:
            if isinstance(move, int):
                for _ in range(move):
                    self.level()
                self.check()
            else:
                along, other = move
                self.commit([*self.likely(along), other])

    def likely(self, count: int) -> list[int]:
        """The best path of the tree, at most `count` tokens."""
        node, path = self.session.tree.root, []
        while node.children and len(path) < count:
            node = max(node.children.values(), key=lambda child: child.edge)
            path.append(node.token)
        return path


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """The paths of the nodes that have names, which both sides hold."""
    found = set()
    stack: list[tuple[tuple[int, ...], Node]] = [((), tree.root)]
    while stack:
        path, node = stack.pop()
        for token, child in node.children.items():
            if not child.names:
                continue  # guessed at
            found.add((*path, token))
            stack.append(((*path, token), child))
    return found


MOVES = st.lists(
    st.one_of(st.integers(1, 9), st.tuples(st.integers(0, 4), st.integers(0, VOCABULARY - 1))), max_size=25
)


@settings(max_examples=60)
@given(st.integers(0, 1000), st.booleans(), MOVES, st.sampled_from([400, 40]))
def test_rows_masks_and_both_trees_stay_in_step(
    seed: int, ahead: bool, moves: list[int | tuple[int, int]], credit: int
) -> None:
    Rig(Plan(depth=6, width=3, nodes=8), seed, credit, ahead=ahead).play(moves)


def test_a_kept_subtree_needs_no_pass_over_the_committed_tokens() -> None:
    rig = Rig(Plan(depth=6, width=3, nodes=8), ahead=True, seed=1)
    for _ in range(6):
        rig.level()
    held = len(rig.session.scratch)
    rig.commit(rig.likely(1))
    assert rig.session.cached == len(rig.session.tokens)  # the committed node's row was taken over
    assert 0 < len(rig.session.scratch) < held


def test_children_that_became_worth_sending_are_sent_without_a_pass() -> None:
    rig = Rig(Plan(depth=6, width=3, nodes=8), ahead=True, seed=3)
    rig.session.terms = SentTerms(0.35, ahead=True)
    for _ in range(8):
        rig.level()
    before = paths(rig.upstream)
    best = rig.likely(1)
    below = {path[1:] for path in before if path[:1] == tuple(best) and len(path) > 1}
    rig.commit(best)
    assert below < paths(rig.upstream)


def test_a_refill_stays_within_the_credit() -> None:
    rig = Rig(Plan(depth=6, width=3, nodes=8), ahead=True, seed=3)
    rig.session.terms = SentTerms(0.35, ahead=True)
    for _ in range(8):
        rig.level()
    rig.session.terms = SentTerms(ahead=True)
    rig.session.credit = rig.largest_id + 4
    rig.deliver(rig.session.refill(rig.fit))
    rig.session.credit += 100
    sent = rig.largest_id
    rig.deliver(rig.session.refill(rig.fit))
    assert rig.largest_id > sent
    rig.check()


def test_a_session_stops_at_its_credit_and_resumes_with_more() -> None:
    rig = Rig(Plan(depth=6, width=3, nodes=30), ahead=True, seed=2, credit=7)
    for _ in range(10):
        rig.level()
    assert rig.largest_id <= 7
    assert not rig.level()
    rig.session.credit = 40
    assert rig.level()
    rig.check()


def test_a_node_dropped_by_the_upstream_is_abandoned_with_its_descendants() -> None:
    rig = Rig(Plan(depth=6, width=3, nodes=30), ahead=True, seed=5)
    for _ in range(5):
        rig.level()
    session = rig.session
    victim = next(node for node in session.scratch if session.tree.depth(node) == 1)
    session.remove_dropped([victim.names[0][1]])
    session.tree.check_integrity()
    assert victim.token not in session.tree.root.children
    session.plan = Plan(depth=6, width=1, nodes=30)  # nothing is proposed again
    assert session.refill(rig.fit).tokens == ()
    size = session.tree.size
    session.commit([victim.token])
    assert session.tree.size == 0 < size


def test_a_plan_of_depth_zero_and_the_end_of_the_context_stop_drafting() -> None:
    rig = Rig(Plan(depth=0), seed=0)
    assert not rig.level()
    rig = Rig(Plan(depth=6, width=3, nodes=8), seed=0)
    assert rig.session.next_segment(rig.fit, chunk=9, limit=3, context=len(PROMPT), rows=300) is None
    context = len(PROMPT) + 2
    while rig.level(context=context):
        pass
    depths = [node.position for level in rig.session.tree.levels() for node in level]
    assert max(depths) == context - 1


def test_a_repetition_runs_in_one_pass_and_is_sent_after_the_model_judged_it() -> None:
    rig = Rig(Plan(depth=6, width=3, nodes=8), seed=1)
    session = rig.session = TopKSession(
        MirrorSnapshot((1, 2, 3) * 4, 0, TERMS, Plan(depth=6, width=3, nodes=8), 400), 0, 12
    )
    rig.upstream = TokenTree(session.tokens)
    assert session.refill(rig.fit).tokens == ()
    assert session.tree.size > 1
    while len(session.tokens) - session.cached > 4:
        rig.level()
    _, nodes = session.next_segment(rig.fit, chunk=4, limit=8, context=200, rows=300) or (None, [])
    assert nodes[0] is session.tree.root
    assert [node.token for node in nodes[1:]] == [1, 2, 3, 1, 2, 3][: len(nodes) - 1]
    assert len(nodes) > 2
    rig.level(limit=8)
    assert paths(rig.upstream) == paths(session.tree)
    assert all(node.names or not session.tree.root.expanded for node in session.tree.root.children.values())


def test_a_long_text_is_indexed_in_pieces_and_looked_up_once_all_is_read() -> None:
    def session(tokens: Sequence[int]) -> TopKSession:
        return TopKSession(MirrorSnapshot(tuple(tokens), 0, TERMS, Plan(depth=6, width=3, nodes=8), 400), 0, VOCABULARY)

    short, long = session((1, 2, 3) * 4), session((1, 2, 3) * READ_AT_ONCE)
    assert (short.behind, long.behind) == (False, True)
    long.commit([1])  # waits with the rest
    assert long.repeats.length == READ_AT_ONCE
    long.refill(DrafterFits())
    assert long.tree.size == 0, "what follows the end is not known yet"
    while long.behind:
        assert 0 < long.read_on(700) <= 700
    long.refill(DrafterFits())
    short.commit([1])
    short.refill(DrafterFits())
    assert [node.token for _, node in long.tree.best_first(depth=9, width=9)] == [
        node.token for _, node in short.tree.best_first(depth=9, width=9)
    ]
    assert long.tree.size > 1


def test_a_level_that_is_not_worth_the_upstreams_wait_is_not_run() -> None:
    rig = Rig(Plan(depth=6, width=3, nodes=8), seed=1)
    while rig.level():
        if rig.session.tree.root.expanded:
            break
    session = rig.session
    ask = {"chunk": 4, "limit": 3, "context": 200, "rows": 300}
    session.terms = SentTerms(time_cost_tokens_per_s=100.0)
    assert session.next_segment(rig.fit, **ask, level_s=0.0001) is not None
    assert session.next_segment(rig.fit, **ask, level_s=1.0) is None
    session.terms = SentTerms()  # no step waits for the drafter
    assert session.next_segment(rig.fit, **ask, level_s=1.0) is not None
