"""A drafter's copy of a session: what is committed, on what terms to draft, and the tree that grows on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.contract import Contract, Plan
from outrider.core.digest import NOTHING, Prefix
from outrider.core.drawn_tree import tree_of
from outrider.core.tree import Delta, Node
from outrider.rpc.codec import FeatureRows

OWN = 0  # the drafter's own name as a sender, in its own tree


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a drafter needs to start: what is committed, and under which terms to draft."""

    tokens: tuple[int, ...]
    digest: int
    contract: Contract
    plan: Plan
    credit: int
    price: float = 0.0
    time_price: float = 0.0
    ahead: bool = False
    answer_position: int = 0  # where the contract's penalties and limits count from
    epoch: int = 0
    features: FeatureRows | None = None  # for the last tokens, as many as there are rows; None: not asked for
    known: Prefix = NOTHING  # of the tokens, a part whose digest was computed while they came
    vocabulary: int = 2**32  # ids that the target has
    sayable: int = 2**32  # ids that it can say are below


@dataclass(frozen=True, slots=True)
class Update:
    """What an upstream's Commit frame says."""

    position: int
    tokens: tuple[int, ...]
    digest: int
    plan: Plan | None
    price: float
    time_price: float
    ahead: bool
    credit: int
    dropped: tuple[int, ...]
    features: FeatureRows | None = None  # a row for each token; None: not asked for


class Replica:
    """The copy. What drafts adds nodes to `tree`, and announces them."""

    def __init__(self, snapshot: Snapshot, *, first_id: int = 1) -> None:
        self.contract = snapshot.contract
        self.plan = snapshot.plan
        self.credit = snapshot.credit
        self.price = snapshot.price
        self.time_price = snapshot.time_price
        self.ahead = snapshot.ahead
        self.tokens = list(snapshot.tokens)
        self.answer_position = snapshot.answer_position
        self.vocabulary = snapshot.vocabulary
        self.sayable = snapshot.sayable
        self.tree = tree_of(snapshot.contract, self.tokens, known=snapshot.known)
        self.next_id = first_id
        self._rescored: list[Node] = []  # that the upstream knows, and whose edges have changed since
        self._version = 0  # of the last rescoring

    def snapshot(self) -> Snapshot:
        """What it stands for now, to begin anew with."""
        return Snapshot(
            tokens=tuple(self.tokens),
            digest=self.tree.digest,
            contract=self.contract,
            plan=self.plan,
            credit=self.credit,
            price=self.price,
            time_price=self.time_price,
            ahead=self.ahead,
            answer_position=self.answer_position,
            known=self.tree.known,
            vocabulary=self.vocabulary,
            sayable=self.sayable,
        )

    @property
    def wanted(self) -> bool:
        """Whether anything that may be drafted is worth it. At a price of 1 nothing is."""
        return self.plan.depth > 0 and self.price < 1.0

    def follow(self, update: Update) -> bool:
        """Takes what the target said, and the terms. False when the copy is another one than the upstream's: it needs a
        snapshot."""
        if update.position != len(self.tokens):
            return False
        self.tree.commit(update.tokens)
        self.tokens.extend(update.tokens)
        self.obey(update)
        return self.tree.digest == update.digest

    def obey(self, update: Update) -> list[tuple[int, int]]:
        """Takes the terms of an update whose tokens have been followed. Returns the (sender, id) of nodes that the
        upstream dropped."""
        if update.plan is not None and update.plan.version > self.plan.version:
            self.plan = update.plan
        self.price, self.time_price = update.price, update.time_price
        self.ahead = update.ahead
        self.credit = update.credit
        return self.abandon(update.dropped)

    def announce(self, added: Sequence[Node], origin: str = "", span: bytes = b"") -> Delta:
        """Names new nodes, parents before children, and puts them as a delta. It may be empty. What hints have added
        goes with its children; what is beyond the credit stays unsaid.

        `origin`: who has drafted them, if not this drafter; `span`: in which one, where the request is traced.
        """
        first = self.next_id
        added = [*self._unnamed_above(added), *added][: self.room]
        for node in added:
            self.tree.name(node, OWN, self.next_id)
            self.next_id += 1
        rescored = tuple(
            (self._identity(node), node.edge) for node in self._rescored if _told(node) and self.tree.holds(node)
        )
        self._rescored.clear()
        self._version += bool(rescored)
        return Delta(
            root_position=self.tree.root.position,
            root_digest=self.tree.digest,
            first_id=first,
            parents=tuple(self._identity(node.parent) for node in added if node.parent),
            tokens=tuple(node.token for node in added),
            edges=tuple(node.edge for node in added),
            drawn=tuple(parent.q for parent in dict.fromkeys(node.parent for node in added) if parent and parent.q),
            origin=origin,
            rescored=rescored,
            version=self._version if rescored else 0,
            span=span,
        )

    def _unnamed_above(self, added: Sequence[Node]) -> list[Node]:
        """The ancestors of these nodes that the upstream has not heard of from here, parents before children."""
        found: dict[Node, None] = {}
        new = set(added)
        for node in added:
            missing = []
            parent = node.parent
            while parent not in (None, self.tree.root) and not _told(parent) and parent not in new:
                missing.append(parent)
                parent = parent.parent
            found.update(dict.fromkeys(reversed(missing)))
        return [*found]

    def abandon(self, identities: Sequence[int]) -> list[tuple[int, int]]:
        """The upstream dropped these nodes: so does this copy. Returns all (sender, id) of them."""
        names: list[tuple[int, int]] = []
        for identity in identities:
            node = self.tree.node(OWN, identity)
            if node is not None:
                names += node.names
                self.tree.remove(node)
        return names

    @property
    def room(self) -> int:
        """Nodes that the upstream's credit still allows."""
        return max(0, self.credit - self.next_id + 1)

    def _identity(self, node: Node) -> int:
        """As the upstream knows it."""
        if node is self.tree.root:
            return 0
        return next(identity for sender, identity in node.names if sender == OWN)


def _told(node: Node) -> bool:
    """Whether the upstream has heard of it from here."""
    return any(sender == OWN for sender, _ in node.names)
