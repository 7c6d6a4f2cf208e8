"""A drafter between two others keeps three trees in step, whatever is drafted, rescored, dropped and committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_svc.relay import Relay
from drafter_svc.sessions.mirror import OWN, Mirror
from drafter_svc.sessions.topk_session import TopKSession
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.construction.expansion import RESEND_THRESHOLD, DrafterFits
from outrider.core.control.cost.calibration import Calibration
from outrider.core.session.contract import Contract, Plan, SentTerms
from outrider.core.session.digest import EMPTY, extend
from outrider.core.session.snapshot import MirrorSnapshot, MirrorUpdate
from outrider.core.tree.delta import Delta, Hints
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree
from outrider.engine.interface.logits import HostLogits, logits_rows
from outrider.errors import Overloaded
from outrider.upstream.drafter_sender import DrafterSender
from outrider.upstream.upstream_session import Subscription, UpstreamSession, UpstreamStream
from outrider.v1.types_pb2 import Heartbeat

VOCABULARY = 12
PROMPT = (3, 1, 4, 1, 5)
PLAN = Plan(version=1, depth=6, width=3, nodes=12)
TERMS = Contract(seed=4, max_tokens=100)


class Three(DrafterSender):
    """A lower drafter's copy, the relay over a session with a model, and the upstream's tree; what one sends, the
    next receives at once."""

    def __init__(self, seed: int, credit: int = 400, contract: Contract = TERMS, target: int = VOCABULARY) -> None:
        """`target`: how many ids it has; the lower drafter has all of them."""
        self.random = np.random.default_rng(seed)
        self.target = target
        snapshot = MirrorSnapshot(PROMPT, extend(EMPTY, PROMPT), contract, PLAN, credit, unpadded_vocabulary=target)
        self.session = TopKSession(snapshot, 0, VOCABULARY)
        self.fits = DrafterFits()
        self.upper = TokenTree(PROMPT)
        self.sent: list[str] = []  # origins of what went up
        self.relay = Relay(Attachment("s", "t", 1, b""), self.session, self, self.forward)
        self.stream = UpstreamStream("below", Heartbeat)
        self.subscription = self.relay.subscribe(self.stream, 1, Calibration())
        self.lower = Mirror(
            MirrorSnapshot(PROMPT, extend(EMPTY, PROMPT), contract, PLAN, self.relay.grant(self.subscription))
        )

    def forward(self, nodes: Sequence[Node], origin: str, span: bytes) -> None:
        self.session.rescore(nodes, self.fits)
        self._send_up(nodes, origin)

    def _send_up(self, nodes: Sequence[Node], origin: str = "") -> None:
        delta = self.session.announce(nodes, origin)
        assert self.upper.graft(1, delta).dropped == []
        self.sent.append(delta.origin)

    def publish(self, session: UpstreamSession, position: int, tokens: Sequence[int]) -> None:
        credit = self.relay.grant(self.subscription)
        update = MirrorUpdate(position, tuple(tokens), self.session.tree.digest, None, SentTerms(), credit, ())
        assert self.lower.apply_update(update)

    def hint(self, session: UpstreamSession, hints: Hints) -> None:
        self.lower.tree.hint(hints)

    def report_dropped(self, dropped: Mapping[Subscription, Sequence[int]]) -> None:
        self.lower.remove_dropped(dropped.get(self.subscription, ()))

    def resend_snapshots(self, session: UpstreamSession) -> None:
        credit = self.relay.grant(self.subscription)
        digest = self.session.tree.digest
        snapshot = MirrorSnapshot(tuple(self.session.tokens), digest, self.session.contract, PLAN, credit)
        self.lower = Mirror(snapshot, first_id=self.lower.next_id)

    def draft_below(self, count: int) -> None:
        """The lower drafter adds some nodes anywhere."""
        nodes = [self.lower.tree.root, *(node for _, node in self.lower.tree.best_first(depth=5, width=VOCABULARY))]
        added = []
        for _ in range(min(count, self.lower.room // 6)):
            parent = nodes[self.random.integers(len(nodes))]
            token = int(self.random.integers(self.target))
            if token not in parent.children:
                added.append(self.lower.tree.add(parent, token, -int(self.random.integers(1, 40)) / 16))
                nodes.append(added[-1])
        delta = self.lower.announce(added)
        self.report_dropped(self.relay.graft(self.subscription, delta, 0.0, passing=False))
        self.check()

    def rescore(self) -> None:
        """One pass of the model over whatever is worth it."""
        chosen = self.session.next_segment(self.fits, chunk=64, limit=8, context=200, rows=300)
        if chosen is None:
            return
        segment, nodes = chosen
        assert segment.tokens.max() < VOCABULARY
        self.session.advance(segment, nodes)
        logits = self.random.normal(0, 1.5, (len(nodes), VOCABULARY)).astype(np.float32)
        delta = self.session.expand(nodes, logits_rows(HostLogits(logits), 0, len(nodes)), self.fits)
        assert self.upper.graft(1, delta).dropped == []
        self.relay.hint(0.0)
        self.check()

    def commit(self, tokens: list[int]) -> None:
        position = len(self.session.tokens)
        self.upper.commit(tokens)
        self.relay.calibrate_committed(tokens)
        self.session.commit(tokens)
        self._send_up([])
        self.relay.publish(position, tokens, 0.0)
        self.check()

    def drop_above(self) -> None:
        """The upstream drops some node and what is below it."""
        nodes = [node for _, node in self.upper.best_first(depth=9, width=VOCABULARY)]
        if not nodes:
            return
        node = nodes[self.random.integers(len(nodes))]
        dropped = [identity for _, identity in node.names]
        self.upper.remove(node)
        self.report_dropped(self.relay.owners(self.session.remove_dropped(dropped)))
        self.check()

    def check(self) -> None:
        for tree in (self.lower.tree, self.session.tree, self.upper):
            tree.check_integrity()
        middle = paths(self.session.tree)
        assert all(token < self.target for path in middle for token in path)
        own_paths = {path: node for path, node in middle.items() if any(sender == OWN for sender, _ in node.names)}
        above = paths(self.upper)
        assert own_paths.keys() == above.keys()
        for path, node in own_paths.items():
            assert abs(above[path].edge - node.edge) <= RESEND_THRESHOLD
        sender = self.subscription.sender
        for path, node in paths(self.lower.tree).items():
            for own, identity in node.names:
                assert own == OWN
                assert self.session.tree.ids.node(sender, identity) is middle[path]


def paths(tree: TokenTree) -> dict[tuple[int, ...], Node]:
    return {tuple(tree.path(node)): node for _, node in tree.best_first(depth=99, width=99)}


@given(
    seed=st.integers(0, 2**32),
    credit=st.sampled_from([20, 60, 400]),
    target=st.sampled_from([VOCABULARY - 5, VOCABULARY, VOCABULARY + 5]),
    acts=st.lists(st.sampled_from(["below", "rescore", "commit on", "commit off", "drop", "renew"]), max_size=30),
)
def test_three_trees_stay_in_step(seed: int, credit: int, target: int, acts: list[str]) -> None:
    """Return whether the one between has as many ids as the target, fewer or more."""
    three = Three(seed, credit, target=target)
    for act in acts:
        match act:
            case "below":
                three.draft_below(4)
            case "rescore":
                three.rescore()
            case "commit on":
                best = next((node for _, node in three.upper.best_first(depth=9, width=9)), None)
                three.commit([best.token, 6] if best else [6])
            case "commit off":
                three.commit([int(three.random.integers(target))])
            case "drop":
                three.drop_above()
            case "renew":
                old = three.session
                snapshot = MirrorSnapshot(
                    tuple(old.tokens), old.tree.digest, TERMS, PLAN, old.credit, unpadded_vocabulary=target
                )
                three.session = TopKSession(snapshot, 0, VOCABULARY, first_id=old.next_id)
                three.upper = TokenTree(old.tokens)
                three.upper.ids.of(1).resume(old.next_id - 1)
                three.relay.restart(three.session)
                three.check()


def test_nodes_from_a_lower_tier_go_up_at_once_with_their_origin() -> None:
    three = Three(1)
    three.draft_below(3)
    assert three.sent == ["below"]
    assert len(paths(three.upper)) == len(paths(three.lower.tree)) > 0


def test_one_pass_judges_all_nodes_from_below_and_drops_none() -> None:
    three = Three(2)
    three.draft_below(6)
    before = paths(three.upper).keys()
    edges = {path: node.edge for path, node in paths(three.upper).items()}
    three.rescore()
    after = paths(three.upper)
    assert before <= after.keys()
    assert any(after[path].edge != edge for path, edge in edges.items())
    assert len(after) > len(before)


def test_a_lower_tier_drafts_under_hinted_nodes() -> None:
    three = Three(3)
    three.rescore()
    known = paths(three.lower.tree)
    assert known
    assert all(node.rescored and not node.names for node in known.values())
    leaf = max(known, key=len)
    child = three.lower.tree.add(known[leaf], 11, -0.5)
    delta = three.lower.announce([child])
    assert delta.tokens == (*leaf, 11)
    three.report_dropped(three.relay.graft(three.subscription, delta, 0.0, passing=False))
    three.check()
    assert (*leaf, 11) in paths(three.upper)


def test_a_relay_takes_no_node_beyond_its_upstream_credit() -> None:
    three = Three(4, credit=5)
    for _ in range(9):
        three.draft_below(4)
    assert len(paths(three.upper)) <= 5


def test_a_pass_waits_for_the_lower_tier_at_most_its_own_duration() -> None:
    three = Three(5)
    three.commit([7])  # at second 0
    assert three.relay.hold_s(0.0, 0.02) == pytest.approx(0.02)
    assert three.relay.hold_s(0.03, 0.02) < 0
    three.relay.exhaust(three.subscription, three.session.tree.root.position)
    assert three.relay.hold_s(0.0, 0.02) == 0.0
    three.rescore()  # with what it hints, there may be more to draft
    assert three.relay.drafting


def test_a_session_that_draws_from_q_has_no_lower_tier() -> None:
    three = Three(6)
    drawn = Contract(seed=4, max_tokens=100, rule="recursive-rejection")
    snapshot = MirrorSnapshot(PROMPT, extend(EMPTY, PROMPT), drawn, PLAN, 400)
    relay = Relay(Attachment("s", "t", 1, b""), TopKSession(snapshot, 0, VOCABULARY), three, three.forward)
    with pytest.raises(Overloaded, match="at most 0"):
        relay.subscribe(three.stream, 2, Calibration())


def claims(relay: Relay) -> int:
    """How many drafters' calibrations a relay keeps."""
    return len(relay._claims)


def test_a_drafter_that_resubscribes_repeatedly_is_forgotten_with_its_nodes() -> None:
    three = Three(7)
    claimed = Calibration()
    three.relay.subscribe(three.stream, 2, claimed)
    delta = Delta(len(PROMPT) - 1, three.session.tree.digest, 1, (0,), (7,), (0.0,))
    three.relay.grant(three.relay.subscriptions[three.stream])
    three.relay.graft(three.relay.subscriptions[three.stream], delta, 0.0, passing=False)
    (node,) = three.session.tree.root.children.values()
    for attachment in range(3, 1003):
        three.relay.subscribe(three.stream, attachment, Calibration())
    assert claims(three.relay) <= 3  # the last one's, that before it, and whose node stands
    three.relay.calibrate([node], None)
    assert claimed.corrected(0.0) < 0.0  # it answers for its node
    three.session.tree.remove(node)
    three.relay.subscribe(three.stream, 1003, Calibration())
    assert claims(three.relay) == 1
    three.relay.calibrate([node], None)  # its pass had begun before it was removed


def test_nodes_sent_before_a_session_restarts_count_as_a_replay() -> None:
    three = Three(seed=0)
    delta = three.lower.announce([three.lower.tree.add(three.lower.tree.root, token, -0.5) for token in (1, 2)])
    three.relay.graft(three.subscription, delta, 0.0, passing=False)
    assert three.session.tree.size == 2
    three.session = TopKSession(three.session.snapshot(), 0, VOCABULARY, first_id=three.session.next_id)
    three.relay.restart(three.session)
    three.relay.graft(three.subscription, delta, 0.0, passing=False)
    assert three.session.tree.size == 0
    assert three.relay.grant(three.subscription) > delta.first_id + len(delta.tokens)
