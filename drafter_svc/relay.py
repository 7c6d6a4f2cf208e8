"""A session at a drafter that serves a lower tier: an upstream to the drafters there, a drafter to its own upstream.

Nodes from the lower tier are sent up at once, under this drafter's ids. Then its own model scores each node, adds
children, and drops none. Commits and terms from above are sent down. Hints go with them: the best of the tree by this
drafter's scores, so that the lower tier drafts where it pays. Hints are no commits.

Sources: Spector and Re, staged speculation (arXiv 2308.04623); CS-Drafting's vertical cascade (Chen et al., arXiv
2312.11462).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice

from drafter_svc.sessions.mirror import OWN
from drafter_svc.sessions.session import DrafterSession
from drafter_svc.upstreams.upstream import Attachment
from outrider.core.construction.expansion import floor_score
from outrider.core.session.contract import Plan, SentTerms
from outrider.core.tree.delta import Delta, Hints
from outrider.core.tree.node import Node
from outrider.upstream.drafter_sender import DrafterSender
from outrider.upstream.upstream_session import MAX_DRAFTERS, Subscription, UpstreamSession


class RelayedTerms:
    """The upstream's terms, as they are passed on to the lower tier."""

    resting = False  # an upstream that wants drafters to rest sends a min_path_score of 1

    def __init__(self, session: DrafterSession) -> None:
        self.plan = session.plan  # the one that was last passed on
        self._session = session

    @property
    def sent(self) -> SentTerms:
        """The terms as they came."""
        return self._session.terms


class Relay(UpstreamSession):
    """One session. `sender` sends to the lower tier, and `forward` sends the lower tier's nodes up."""

    terms: RelayedTerms

    def __init__(
        self,
        key: Attachment,
        session: DrafterSession,
        sender: DrafterSender,
        forward: Callable[[Sequence[Node], str, bytes], None],
    ) -> None:
        super().__init__(session.contract, OWN)
        self.id, self.tenant, self.epoch = key.session_id, key.tenant, key.epoch
        self.answer_position = session.answer_position
        self.changed = False  # whether the lower tier has sent something since the last level
        self._sender = sender
        self._forward = forward
        self._last_sent = 0.0  # when the lower tier was last sent tokens or hints
        self._adopt(session)

    def restart(self, session: DrafterSession) -> None:
        """Restarts the session over another tree; drafters of the lower tier get a snapshot."""
        before = self.tree
        self._adopt(session)
        for subscription in self.subscriptions.values():
            self.tree.ids.of(subscription.sender).resume(before.ids.of(subscription.sender).last_id)
        self._sender.resend_snapshots(self)

    def _adopt(self, session: DrafterSession) -> None:
        self._session = session
        self.vocabulary, self.unpadded_vocabulary = session.vocabulary, session.unpadded_vocabulary
        self.tree, self.tokens, self.terms = session.tree, session.tokens, RelayedTerms(session)

    @property
    def ceilings(self) -> Plan:
        """The upstream's plan."""
        return self.terms.plan

    @property
    def free_nodes(self) -> int:
        """Nodes that fit the tree and the upstream's credit."""
        return min(self.tree.capacity - self.tree.size, self._session.room)

    @property
    def max_drafters(self) -> int:
        """The most drafters that the session may have; none for a sampled tree, which one q alone may draw."""
        return 0 if self.drawn else MAX_DRAFTERS

    def on_drafter_subscribed(self) -> None:
        """Send hints; levels wait for the new drafter from the next commit on."""
        self.hint(time.monotonic())

    def on_delta(
        self, subscription: Subscription, delta: Delta, added: Sequence[Node], now: float, *, passing: bool
    ) -> None:
        """Send new nodes up at once; remove those for which the upstream gives no credit."""
        beyond = added[self._session.room :]
        self._sender.report_dropped(self.owners(name for node in beyond for name in node.names))
        for node in reversed(beyond):
            self.tree.remove(node)
        self._forward(added[: len(added) - len(beyond)], delta.origin or subscription.stream.drafter_id, delta.span)
        self.changed = True

    def exhaust(self, subscription: Subscription, position: int) -> None:
        """Note that the drafter has nothing more to send, so that no level waits for it."""
        super().exhaust(subscription, position)
        self.changed = True

    def calibrate_committed(self, tokens: Sequence[int]) -> None:
        """Calibrates the lower tier's claimed scores by tokens that are about to be committed."""
        node: Node | None = self.tree.root
        for token in tokens:
            if node is None:
                return
            child = node.children.get(token)
            self.calibrate(node.children.values(), child)
            node = child

    def publish(self, position: int, tokens: Sequence[int], now: float) -> None:
        """Send committed tokens, from `position` on, or changed terms."""
        self.terms.plan = self._session.plan
        if tokens:
            self._last_sent = now
        self._sender.publish(self, position, tokens)

    def hint(self, now: float) -> None:
        """Send the best of the tree, as far as this drafter's model has scored it. A drafter that was exhausted may
        have more nodes then.
        """
        if not self.subscriptions:
            return
        floor = floor_score(self.terms.sent.min_path_score, ahead=self.terms.sent.ahead)
        index: dict[Node | None, int] = {self.tree.root: -1}
        nodes: list[Node] = []
        plan = self.terms.plan
        for score, node in islice(self.tree.best_first(depth=plan.depth, width=plan.width), plan.nodes):
            if score < floor:
                break
            if node.parent is not None and node.parent in index and node.parent.expanded:
                index[node] = len(nodes)
                nodes.append(node)
        if nodes:
            parents = tuple(index[node.parent] for node in nodes)
            tokens, edges = tuple(node.token for node in nodes), tuple(node.edge for node in nodes)
            self._sender.hint(self, Hints(self.tree.root.position, parents, tokens, edges))
            self._last_sent = now
            for subscription in self.subscriptions.values():
                subscription.exhausted = -1

    def hold_s(self, now: float, level_s: float) -> float:
        """Return the seconds that a pass of `level_s` seconds may still wait, to score the lower tier's next nodes,
        too.

        A pass waits at most as long as it takes itself: then it never costs more than twice the time of not waiting.
        """
        return self._last_sent + level_s - now if self.drafting else 0.0
