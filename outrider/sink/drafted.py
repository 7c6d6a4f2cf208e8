"""A session as its drafters see it: what is committed, the tree that they grow, the terms that they draft on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.core.calibration import Calibration
from outrider.core.contract import Contract, Plan
from outrider.core.rules import Drawn, rule_of
from outrider.core.tree import Delta, Node, TokenTree
from outrider.errors import InvalidRequest, Overloaded
from outrider.sink.stream import DraftStream

RESTING_PRICE = 1.0  # no node is better than certain
MAX_DRAFTERS = 16  # of one session, those of lower tiers included


class Fused(Protocol):
    """The target's features of a session's tokens, fused, as drafters can have them."""

    width: int  # of a row
    known: int  # of so many tokens, from the first on; the last committed token is never among them

    def rows(self, start: int, stop: int) -> bytes:
        """Of the tokens from `start` up to `stop`: bfloat16, little-endian."""


@dataclass(eq=False, slots=True)
class Subscription:
    """One drafter's part in a session. Node ids are scoped to it."""

    session: Drafted
    stream: DraftStream
    attachment: int
    sender: int  # its key in the tree
    calibration: Calibration  # of the drafter
    granted: int = 0  # the largest id that it was ever allowed
    plan_version: int = -1  # the last one that it was told
    exhausted: int = -1  # position of the root below which it has sent all it will
    begun: int = -1  # position of the root below which it last sent anything
    featured: bool = False  # it is told features, too
    waits: bool = False  # for its snapshot, until all features of that are known


class Drafted(ABC):
    """What an upstream has of a session, be it the verifier or a drafter that serves a lower tier."""

    id: str
    tenant: str
    epoch: int
    contract: Contract
    answer_position: int
    vocabulary: int  # ids that its target has
    sayable: int  # ids that its target can say are below, and so must those of nodes be
    plan: Plan
    tokens: list[int]  # committed
    tree: TokenTree

    def __init__(self, contract: Contract, first_sender: int) -> None:
        """`first_sender`: keys of drafters in the tree count up from the one after it."""
        self.contract = contract
        self.rule = rule_of(contract)
        self.drawn = self.rule.drawn is Drawn.SAMPLED  # whether its tree is drawn from q
        self.subscriptions: dict[DraftStream, Subscription] = {}
        self.wire_bytes = 0  # on drafters' streams
        self.fused: Fused | None = None  # features for drafters that ask for them
        self._claims: dict[int, Calibration] = {}  # by sender: of those that are there, or that have nodes in the tree
        self._first_sender = first_sender
        self._senders = first_sender
        self._origins: dict[str, int] = {}  # keys of drafters of lower tiers

    @property
    @abstractmethod
    def ceilings(self) -> Plan:
        """The plan as drafters are to hear it."""

    @property
    @abstractmethod
    def resting(self) -> bool:
        """Whether drafting for it would cost more than it brings."""

    @property
    @abstractmethod
    def price(self) -> float:
        """Path score below which drafters need not draft."""

    @property
    @abstractmethod
    def time_price(self) -> float:
        """Tokens that a second is worth to drafters; 0: nobody waits for them."""

    @property
    @abstractmethod
    def ahead(self) -> bool:
        """Whether drafters go on below nodes that may be in verification."""

    @property
    @abstractmethod
    def space(self) -> int:
        """Nodes that may still come."""

    @property
    @abstractmethod
    def most(self) -> int:
        """Drafters that it may have."""

    @abstractmethod
    def joined(self) -> None:
        """A drafter begins, or begins anew: its snapshot is on its way."""

    @abstractmethod
    def grown(
        self, subscription: Subscription, delta: Delta, added: Sequence[Node], now: float, *, passing: bool
    ) -> None:
        """A drafter's delta had these new nodes; a pass runs or not."""

    @property
    def features_known(self) -> bool:
        """Whether those of all tokens but the last are known, and there are any."""
        return self.fused is not None and 1 < len(self.tokens) <= self.fused.known + 1

    def subscribe(
        self, stream: DraftStream, attachment: int, calibration: Calibration, *, featured: bool = False
    ) -> Subscription:
        """Adds a drafter, or restarts its part under new ids. Raises Overloaded when it has too many."""
        self.unsubscribe(stream)
        most = self.most
        if len(self.subscriptions) >= most:
            drafters = "drafter" if most == 1 else "drafters"
            raise Overloaded(f"a session under {self.rule.name} has at most {most} {drafters} here")
        self._senders += 1
        subscription = Subscription(self, stream, attachment, self._senders, calibration, featured=featured)
        self.subscriptions[stream] = stream.subscriptions[attachment] = subscription
        self._forget_claims()
        self._claims[subscription.sender] = calibration
        return subscription

    def unsubscribe(self, stream: DraftStream) -> None:
        """Removes a drafter; its nodes stay."""
        subscription = self.subscriptions.pop(stream, None)
        if subscription:
            stream.subscriptions.pop(subscription.attachment, None)
            stream.forget(subscription.attachment)
            self.tree.forget(subscription.sender)

    def dismiss(self, reason: str) -> None:
        """The session is over here: lets all its drafters go."""
        for stream, subscription in list(self.subscriptions.items()):
            self.unsubscribe(stream)
            stream.close(subscription.attachment, reason)

    def graft(
        self, subscription: Subscription, delta: Delta, now: float, *, passing: bool
    ) -> dict[Subscription, list[int]]:
        """Takes nodes that came while a pass runs or not. Returns ids that were dropped, by whose they are.

        Raises as the tree does, and InvalidRequest for nodes beyond the credit.
        """
        last = delta.first_id + len(delta.tokens) - 1
        if last > subscription.granted:
            raise InvalidRequest("first_id", f"node {last} is beyond the credit, which ends at {subscription.granted}")
        judge, origin = subscription.calibration.corrected, self._origin(delta.origin)
        grafted = self.tree.graft(subscription.sender, delta, judge, origin=origin)
        subscription.begun = self.tree.root.position
        self.grown(subscription, delta, grafted.added, now, passing=passing)
        return self.owners(grafted.dropped)

    def owners(self, names: Iterable[tuple[int, int]]) -> dict[Subscription, list[int]]:
        """Which of these (sender, id) are whose, of those that are still there."""
        theirs = {subscription.sender: subscription for subscription in self.subscriptions.values()}
        found: dict[Subscription, list[int]] = {}
        for sender, identity in names:
            if sender in theirs:
                found.setdefault(theirs[sender], []).append(identity)
        return found

    @property
    def origins(self) -> dict[str, int]:
        """Drafters of lower tiers, and their keys in the tree."""
        return self._origins

    def exhaust(self, subscription: Subscription, position: int) -> None:
        """The drafter has sent all that it will below the root at that position."""
        subscription.exhausted = position

    def grant(self, subscription: Subscription) -> int:
        """The largest id that the drafter may send from here on."""
        credit = self.tree.last_id(subscription.sender) + max(0, self.space)
        subscription.granted = max(subscription.granted, credit)
        return credit

    @property
    def drafting(self) -> bool:
        """Whether some drafter may still send something below the present root."""
        root = self.tree.root.position
        return any(subscription.exhausted != root for subscription in self.subscriptions.values())

    def hold(self, siblings: Iterable[Node], right: Node | None) -> None:
        """Holds what was claimed of them against what the target said, be it one of them or not."""
        for node in siblings:
            calibration = self._claims.get(node.claim[0]) if node.claim else None
            if node.claim and calibration:  # not of a node that left the tree during its pass, and its drafter with it
                calibration.observe(node.claim[1], node is right)

    def _forget_claims(self) -> None:
        """Drops the calibrations of drafters that have gone, once none of their nodes is in the tree.

        Until then they count: a drafter that subscribes again answers for what it claimed before.
        """
        there = {subscription.sender for subscription in self.subscriptions.values()} | self.tree.claimants()
        gone = [sender for sender in self._claims if sender > self._first_sender and sender not in there]
        for sender in gone:
            del self._claims[sender]

    def _origin(self, name: str) -> int | None:
        """The key of a drafter of a lower tier. Of too many, what they drafted counts as their upstream's."""
        if name and name not in self._origins and len(self._origins) < MAX_DRAFTERS:
            self._senders += 1
            self._origins[name] = self._senders
        return self._origins.get(name)
