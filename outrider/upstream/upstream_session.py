"""A session as its drafters see it: the committed tokens, the tree that they grow, and the terms of drafting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Protocol

from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.control.cost.calibration import Calibration
from outrider.core.session.contract import Contract, Plan, SentTerms
from outrider.core.tree.delta import Delta
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree
from outrider.errors import InvalidRequest, Overloaded
from outrider.upstream.outbox import UpstreamOutbox
from outrider.wire import drafter as wire

MAX_DRAFTERS = 16  # drafters of one session, those of lower tiers included


class FusedFeatures(Protocol):
    """The target's fused features of a session's tokens, as they are sent to drafters."""

    width: int  # numbers in a row
    known: int  # number of tokens, from the first on, whose features are known; never includes the last committed token

    def rows(self, start: int, stop: int) -> bytes:
        """Return the features of the tokens from `start` up to `stop`: bfloat16, little-endian."""


class UpstreamStream(UpstreamOutbox):
    """One drafter's Draft call: what is queued for it, and the sessions that it drafts for."""

    def __init__(
        self,
        drafter_id: str,
        heartbeat: Callable[[], wire.Heartbeat],
        holder: str = "",
        on_admitted: Callable[[], None] = lambda: None,
    ) -> None:
        """`holder`: who the caller is by its certificate; empty without TLS. `on_admitted`: called once."""
        super().__init__(drafter_id, heartbeat)
        self.public_sources = False  # whether everybody may see what it drafts, also what is not accepted
        self.holder = holder
        self.admitted = False  # whether a ticket has admitted it to a session
        self._on_admitted = on_admitted
        self.subscriptions: dict[int, Subscription] = {}  # by attachment
        self.waiting: dict[int, WaitingSubscribe] = {}  # by attachment
        self.attached = 0  # the largest attachment so far

    def admit(self) -> None:
        """Note that a ticket has admitted it to a session."""
        if not self.admitted:
            self.admitted = True
            self._on_admitted()


@dataclass(frozen=True, slots=True)
class WaitingSubscribe:
    """A subscription whose session is not open yet, or whose ticket names a key that is not known yet."""

    subscribe: wire.Subscribe
    reading: int | None  # number of the reading of the keys that it waits for; None: it waits for its session


@dataclass(eq=False, slots=True)
class Subscription:
    """One drafter's part in a session. Node ids are scoped to it."""

    session: UpstreamSession
    stream: UpstreamStream
    attachment: int
    sender: int  # the drafter's key in the tree
    calibration: Calibration  # of the drafter
    granted: int = 0  # the largest id that it was ever granted
    plan_version: int = -1  # version of the last plan that it was sent
    exhausted: int = -1  # position of the root below which it has sent all its nodes
    rests: int = -1  # position of the root below which its terms have it rest
    begun: int = -1  # position of the root below which it last sent nodes
    wants_features: bool = False  # it is sent features, too
    awaits_features: bool = False  # its snapshot waits until all its features are known


class UpstreamTerms(Protocol):
    """On which terms a session's drafters draft."""

    @property
    def plan(self) -> Plan:
        """Upper bounds of a step's tree."""

    @property
    def resting(self) -> bool:
        """Whether drafting would cost more than it brings."""

    @property
    def sent(self) -> SentTerms:
        """The terms that go out with commits."""


class UpstreamSession(ABC):
    """An upstream's view of a session. The upstream is the verifier, or a drafter that serves a lower tier."""

    id: str
    tenant: str
    epoch: int
    contract: Contract
    answer_position: int
    vocabulary: int  # ids that its target has
    unpadded_vocabulary: int  # the target chooses only ids below it, and nodes have only such ids
    terms: UpstreamTerms
    tokens: list[int]  # committed
    tree: TokenTree

    def __init__(self, contract: Contract, first_sender: int) -> None:
        """`first_sender`: drafters' keys in the tree count up from the number after it."""
        self.contract = contract
        self.rule = rule_of(contract)
        self.drawn = self.rule.child_sampling is ChildSampling.SAMPLED  # whether its tree is drawn from q
        self.subscriptions: dict[UpstreamStream, Subscription] = {}
        self.wire_bytes = 0  # sent and received on drafters' streams
        self.fused: FusedFeatures | None = None  # features for drafters that request them
        self._claims: dict[int, Calibration] = {}  # by sender: drafters that are subscribed or have nodes in it
        self._first_sender = first_sender
        self._senders = first_sender
        self.origins: dict[str, int] = {}  # drafters of lower tiers, with their keys in the tree

    @property
    @abstractmethod
    def ceilings(self) -> Plan:
        """The plan as it is sent to drafters."""

    @property
    @abstractmethod
    def free_nodes(self) -> int:
        """Nodes that the tree still has room for."""

    @property
    @abstractmethod
    def max_drafters(self) -> int:
        """The most drafters that the session may have."""

    @abstractmethod
    def on_drafter_subscribed(self) -> None:
        """A drafter has subscribed, for the first time or again: its snapshot follows."""

    @abstractmethod
    def on_delta(
        self, subscription: Subscription, delta: Delta, added: Sequence[Node], now: float, *, passing: bool
    ) -> None:
        """Take the nodes that a drafter's delta added. `passing`: whether a pass runs."""

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.contract.greedy

    @property
    def representative(self) -> bool:
        """Whether other sessions may learn from this one."""
        return self.contract.representative

    @property
    def features_known(self) -> bool:
        """Whether the session has features, and those of all tokens but the last are known."""
        return self.fused is not None and 1 < len(self.tokens) <= self.fused.known + 1

    def subscribe(
        self, stream: UpstreamStream, attachment: int, calibration: Calibration, *, wants_features: bool = False
    ) -> Subscription:
        """Add a drafter, or restart its part under new ids. Raises Overloaded if the session has too many.

        `calibration`: the drafter's, over all sessions that are representative.
        """
        self.unsubscribe(stream)
        calibration = calibration if self.representative else deepcopy(calibration)
        limit = self.max_drafters
        if len(self.subscriptions) >= limit:
            drafters = "drafter" if limit == 1 else "drafters"
            raise Overloaded(f"a session under {self.rule.name} has at most {limit} {drafters} here")
        self._senders += 1
        subscription = Subscription(self, stream, attachment, self._senders, calibration, wants_features=wants_features)
        self.subscriptions[stream] = stream.subscriptions[attachment] = subscription
        self._forget_claims()
        self._claims[subscription.sender] = calibration
        return subscription

    def unsubscribe(self, stream: UpstreamStream) -> None:
        """Remove a drafter; its nodes stay."""
        subscription = self.subscriptions.pop(stream, None)
        if subscription:
            stream.subscriptions.pop(subscription.attachment, None)
            stream.forget(subscription.attachment)
            self.tree.ids.forget(subscription.sender)

    def dismiss(self, reason: str) -> None:
        """Remove all drafters, because the session has ended here."""
        for stream, subscription in list(self.subscriptions.items()):
            self.unsubscribe(stream)
            stream.close(subscription.attachment, reason)

    def graft(
        self, subscription: Subscription, delta: Delta, now: float, *, passing: bool
    ) -> dict[Subscription, list[int]]:
        """Add a delta's nodes to the tree. `passing`: whether a pass runs. Return the ids of dropped nodes by
        subscription.

        Raises as the tree does, and InvalidRequest for nodes beyond the credit.
        """
        last = delta.first_id + len(delta.tokens) - 1
        if last > subscription.granted:
            raise InvalidRequest("first_id", f"node {last} is beyond the credit, which ends at {subscription.granted}")
        judge, origin = subscription.calibration.corrected, self._origin(delta.origin)
        grafted = self.tree.graft(subscription.sender, delta, judge, origin=origin)
        subscription.begun = self.tree.root.position
        self.on_delta(subscription, delta, grafted.added, now, passing=passing)
        return self.owners(grafted.dropped)

    def owners(self, names: Iterable[tuple[int, int]]) -> dict[Subscription, list[int]]:
        """Group these (sender, id) by the subscriptions that they belong to, without drafters that have gone."""
        theirs = {subscription.sender: subscription for subscription in self.subscriptions.values()}
        found: dict[Subscription, list[int]] = {}
        for sender, identity in names:
            if sender in theirs:
                found.setdefault(theirs[sender], []).append(identity)
        return found

    def exhaust(self, subscription: Subscription, position: int) -> None:
        """Note that the drafter has sent all its nodes below the root at that position."""
        subscription.exhausted = position

    def grant(self, subscription: Subscription) -> int:
        """Return the largest id that the drafter may send from here on."""
        credit = self.tree.ids.of(subscription.sender).last_id + max(0, self.free_nodes)
        subscription.granted = max(subscription.granted, credit)
        return credit

    @property
    def drafting(self) -> bool:
        """Whether some drafter may still send nodes below the present root."""
        root = self.tree.root.position
        return any(root not in (it.exhausted, it.rests) for it in self.subscriptions.values())

    def calibrate(self, siblings: Iterable[Node], chosen: Node | None) -> None:
        """Calibrates the claimed scores of siblings by the target's choice, which is one of them or none."""
        for node in siblings:
            calibration = self._claims.get(node.claim[0]) if node.claim else None
            if node.claim and calibration:  # a node may have left the tree during its pass, and its drafter with it
                calibration.observe(node.claim[1], node is chosen)

    def _forget_claims(self) -> None:
        """Drop the calibrations of drafters that have gone, once none of their nodes is in the tree.

        Until then they are kept: a drafter that subscribes again is still measured by its earlier claims.
        """
        there = {subscription.sender for subscription in self.subscriptions.values()} | self.tree.claimants()
        gone = [sender for sender in self._claims if sender > self._first_sender and sender not in there]
        for sender in gone:
            del self._claims[sender]

    def _origin(self, name: str) -> int | None:
        """Return the key of a drafter of a lower tier; None if there are too many: its nodes then count as its
        upstream's.
        """
        if name and name not in self.origins and len(self.origins) < MAX_DRAFTERS:
            self._senders += 1
            self.origins[name] = self._senders
        return self.origins.get(name)
