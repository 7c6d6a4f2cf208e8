"""A session at a drafter that serves a lower tier: an upstream to the drafters there, a drafter to its own upstream.

What they draft goes up at once, under this drafter's ids. Its own model then says what each node is worth, adds
children, and drops none. What is said above goes down: commits, terms; and with them hints, which are no commits: the
best of the tree by this drafter's judgement, so that they draft on where it pays.

Sources: Spector and Re, staged speculation (arXiv 2308.04623); CS-Drafting's vertical cascade (Chen et al., arXiv
2312.11462).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

from drafter_svc.replica import OWN
from drafter_svc.session import DraftSession
from drafter_svc.upstream import Attachment
from outrider.core.contract import Plan
from outrider.core.growth import floor_score
from outrider.core.tree import Delta, Hints, Node
from outrider.sink.drafted import MAX_DRAFTERS, Drafted, Subscription


class Below(Protocol):
    """Tells the lower tier."""

    def publish(self, session: Drafted, position: int, tokens: Sequence[int]) -> None:
        """New tokens from `position` on, or new terms."""

    def renew(self, session: Drafted) -> None:
        """All drafters of a session need a snapshot."""

    def hint(self, session: Drafted, hints: Hints) -> None:
        """What is believed here."""

    def drop(self, dropped: Mapping[Subscription, Sequence[int]]) -> None:
        """These nodes are not in the tree any more although they might be right."""

    def welcome_waiting(self, session: Drafted) -> None:
        """The session is here now."""


class NobodyBelow:
    """This drafter serves no lower tier."""

    def publish(self, session: Drafted, position: int, tokens: Sequence[int]) -> None:
        """Nobody hears it."""

    def renew(self, session: Drafted) -> None:
        """Nobody needs it."""

    def hint(self, session: Drafted, hints: Hints) -> None:
        """Nobody hears it."""

    def drop(self, dropped: Mapping[Subscription, Sequence[int]]) -> None:
        """Nobody had them."""

    def welcome_waiting(self, session: Drafted) -> None:
        """Nobody waits."""


class Relay(Drafted):
    """One session. `forward` sends nodes up that came from below."""

    def __init__(
        self,
        key: Attachment,
        session: DraftSession,
        below: Below,
        forward: Callable[[Sequence[Node], str, bytes], None],
    ) -> None:
        super().__init__(session.contract, OWN)
        self.id, self.tenant, self.epoch = key.session_id, key.tenant, key.epoch
        self.answer_position = session.answer_position
        self.changed = False  # whether there is news from below
        self._below = below
        self._forward = forward
        self._since = 0.0  # when drafters below last heard something
        self._take(session)

    def renew(self, session: DraftSession) -> None:
        """The session began anew: over another tree, which drafters below have to begin with."""
        before = self.tree
        self._take(session)
        for subscription in self.subscriptions.values():
            self.tree.resume(subscription.sender, before.last_id(subscription.sender))
        self._below.renew(self)

    def _take(self, session: DraftSession) -> None:
        self._session = session
        self.vocabulary, self.sayable = session.vocabulary, session.sayable
        self.tree, self.tokens, self.plan = session.tree, session.tokens, session.plan

    @property
    def ceilings(self) -> Plan:
        """As the upstream has them."""
        return self.plan

    @property
    def resting(self) -> bool:
        """Never: that the upstream asks for rest goes down as a price."""
        return False

    @property
    def price(self) -> float:
        """The upstream's."""
        return self._session.price

    @property
    def time_price(self) -> float:
        """The upstream's."""
        return self._session.time_price

    @property
    def ahead(self) -> bool:
        """As the upstream says."""
        return self._session.ahead

    @property
    def space(self) -> int:
        """What fits the tree and can be told above."""
        return min(self.tree.capacity - self.tree.size, self._session.room)

    @property
    def most(self) -> int:
        """Drafters that it may have. What is drawn from one q cannot be another's, too."""
        return 0 if self.drawn else MAX_DRAFTERS

    def joined(self) -> None:
        """Tells what is believed here; it is waited for from the next commit on."""
        self.hint(time.monotonic())

    def grown(
        self, subscription: Subscription, delta: Delta, added: Sequence[Node], now: float, *, passing: bool
    ) -> None:
        """Sends what is new up at once; what the upstream has no room for goes."""
        beyond = added[self._session.room :]
        self._below.drop(self.owners(name for node in beyond for name in node.names))
        for node in reversed(beyond):
            self.tree.remove(node)
        self._forward(added[: len(added) - len(beyond)], delta.origin or subscription.stream.drafter_id, delta.span)
        self.changed = True

    def exhaust(self, subscription: Subscription, position: int) -> None:
        """Whoever waited for it need not wait."""
        super().exhaust(subscription, position)
        self.changed = True

    def learn_from(self, tokens: Sequence[int]) -> None:
        """The target is about to say this: holds what was claimed below against it."""
        node: Node | None = self.tree.root
        for token in tokens:
            if node is None:
                return
            child = node.children.get(token)
            self.hold(node.children.values(), child)
            node = child

    def publish(self, position: int, tokens: Sequence[int], now: float) -> None:
        """Tells what was committed, from `position` on, or what else has changed."""
        self.plan = self._session.plan
        if tokens:
            self._since = now
        self._below.publish(self, position, tokens)

    def hint(self, now: float) -> None:
        """Tells the best of the tree, as far as this drafter's model has judged it. Who had nothing more may have
        something now."""
        if not self.subscriptions:
            return
        floor = floor_score(self.price, ahead=self.ahead)
        index: dict[Node | None, int] = {self.tree.root: -1}
        nodes: list[Node] = []
        for score, node in islice(self.tree.best_first(depth=self.plan.depth, width=self.plan.width), self.plan.nodes):
            if score < floor:
                break
            if node.parent is not None and node.parent in index and node.parent.expanded:
                index[node] = len(nodes)
                nodes.append(node)
        if nodes:
            parents = tuple(index[node.parent] for node in nodes)
            tokens, edges = tuple(node.token for node in nodes), tuple(node.edge for node in nodes)
            self._below.hint(self, Hints(self.tree.root.position, parents, tokens, edges))
            self._since = now
            for subscription in self.subscriptions.values():
                subscription.exhausted = -1

    def patience(self, now: float, level_s: float) -> float:
        """How much longer a pass of `level_s` seconds may wait, for it to judge what is being drafted below, too.

        As long as it takes itself: whoever waits for what he could have had for that price never pays more than twice.
        """
        return self._since + level_s - now if self.drafting else 0.0
