"""A drafter's copy of a session: the committed tokens, the terms of drafting, and the tree."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from outrider.core.session.snapshot import MirrorSnapshot, MirrorUpdate
from outrider.core.tree.delta import Delta, Hints
from outrider.core.tree.node import Node
from outrider.core.tree.sampled_tree import tree_of

OWN = 0  # the drafter's key as a sender in its own tree
MAX_QUEUED = 1024  # messages of a session that may be queued; about a hundred come in a second


class Inbox(deque[MirrorSnapshot | MirrorUpdate | Hints]):
    """A bounded queue of the messages of one session's upstream while the drafter is busy, in order."""

    def __init__(self, wake: Callable[[], object], resync: Callable[[], object]) -> None:
        """`wake`: called when a message is queued; `resync`: requests a snapshot."""
        super().__init__()
        self._wake = wake
        self._resync = resync

    def put(self, message: MirrorSnapshot | MirrorUpdate | Hints) -> None:
        """Queue a message. Empty the queue and request a snapshot instead if it is full."""
        if len(self) >= MAX_QUEUED:
            self.clear()
            self._resync()
        else:
            self.append(message)
            self._wake()


class Mirror:
    """The copy. A proposer adds nodes to `tree`, and announces them."""

    def __init__(self, snapshot: MirrorSnapshot, *, first_id: int = 1) -> None:
        self.contract = snapshot.contract
        self.representative = snapshot.representative and snapshot.contract.representative
        self.plan = snapshot.plan
        self.credit = snapshot.credit
        self.terms = snapshot.terms
        self.tokens = list(snapshot.tokens)
        self.answer_position = snapshot.answer_position
        self.vocabulary = snapshot.vocabulary
        self.unpadded_vocabulary = snapshot.unpadded_vocabulary
        self.tree = tree_of(snapshot.contract, self.tokens, known=snapshot.known)
        self.next_id = first_id
        self._rescored: list[Node] = []  # sent nodes whose edges have changed since
        self._version = 0  # of the last rescoring

    def snapshot(self) -> MirrorSnapshot:
        """Return the mirror's present state, to restart from."""
        return MirrorSnapshot(
            tokens=tuple(self.tokens),
            digest=self.tree.digest,
            contract=self.contract,
            plan=self.plan,
            credit=self.credit,
            terms=self.terms,
            answer_position=self.answer_position,
            known=self.tree.committed.shortest_prefix,
            vocabulary=self.vocabulary,
            unpadded_vocabulary=self.unpadded_vocabulary,
            representative=self.representative,
        )

    @property
    def worth_drafting(self) -> bool:
        """Whether any node can be worth drafting. At a min_path_score of 1 none is."""
        return self.plan.depth > 0 and self.terms.min_path_score < 1.0

    def apply_update(self, update: MirrorUpdate) -> bool:
        """Apply committed tokens and terms. Return False when the mirror differs from the upstream's copy: it needs
        a snapshot.
        """
        if update.position != len(self.tokens):
            return False
        self.tree.commit(update.tokens)
        self.tokens.extend(update.tokens)
        self.apply_terms(update)
        return self.tree.digest == update.digest

    def apply_terms(self, update: MirrorUpdate) -> list[tuple[int, int]]:
        """Apply the terms of an update whose tokens have been applied. Return the (sender, id) of nodes that the
        upstream dropped.
        """
        if update.plan is not None and update.plan.version > self.plan.version:
            self.plan = update.plan
        self.terms, self.credit = update.terms, update.credit
        return self.remove_dropped(update.dropped)

    def announce(self, added: Sequence[Node], origin: str = "", span: bytes = b"") -> Delta:
        """Names new nodes, parents before children, and returns them as a delta, which may be empty. Hinted ancestors
        go with their children; nodes beyond the credit are left out.

        `origin`: the drafter of a lower tier that drafted them; `span`: the span they were drafted in, where the
        request is traced.
        """
        first = self.next_id
        added = [*self._unsent_ancestors(added), *added][: self.room]
        for node in added:
            self.tree.ids.name(node, OWN, self.next_id)
            self.next_id += 1
        rescored = tuple(
            (self._identity(node), node.edge) for node in self._rescored if _was_sent(node) and self.tree.holds(node)
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

    def _unsent_ancestors(self, added: Sequence[Node]) -> list[Node]:
        """Return the ancestors of these nodes that this drafter has not sent, parents before children."""
        found: dict[Node, None] = {}
        new = set(added)
        for node in added:
            missing = []
            parent = node.parent
            while parent not in (None, self.tree.root) and not _was_sent(parent) and parent not in new:
                missing.append(parent)
                parent = parent.parent
            found.update(dict.fromkeys(reversed(missing)))
        return [*found]

    def remove_dropped(self, identities: Sequence[int]) -> list[tuple[int, int]]:
        """Remove nodes that the upstream dropped. Return all their (sender, id)."""
        names: list[tuple[int, int]] = []
        for identity in identities:
            node = self.tree.ids.node(OWN, identity)
            if node is not None:
                names += node.names
                self.tree.remove(node)
        return names

    @property
    def room(self) -> int:
        """Nodes that the upstream's credit still allows."""
        return max(0, self.credit - self.next_id + 1)

    def _identity(self, node: Node) -> int:
        """Return the node's id as sent to the upstream."""
        if node is self.tree.root:
            return 0
        return next(identity for sender, identity in node.names if sender == OWN)


def _was_sent(node: Node) -> bool:
    """Return whether this drafter has sent the node to the upstream."""
    return any(sender == OWN for sender, _ in node.names)
