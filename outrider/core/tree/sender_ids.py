"""The ids that drafters use for their nodes: which of them is a node, which a token committed since, which is dead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.core.tree.node import Node


@dataclass(slots=True)
class SenderIds:
    """The ids of one drafter. They rise; each is at most once a new node."""

    nodes: dict[int, Node] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)  # id -> position of the committed token that it aliases
    last_id: int = 0
    origins: dict[int, int] = field(default_factory=dict)  # id -> the drafter that drafted it, if not the sender
    version: int = 0  # of the last rescoring
    settled: int = 0  # every id up to this one that has no entry is dead
    dead: set[int] = field(default_factory=set)  # dead ids above `settled`

    def find(self, identity: int) -> Node | int | None:
        """Return the live node with that id, or the position of the committed token that it aliases, or None."""
        return self.nodes.get(identity) or self.committed.get(identity)

    def is_dead(self, identity: int) -> bool:
        """Return whether an id that is not found contradicts the committed tokens, rather than was left out."""
        return identity <= self.settled or identity in self.dead

    def resume(self, last_id: int) -> None:
        """Continue after ids that another tree held: all of them up to `last_id` are dead here."""
        self.last_id = self.settled = last_id

    def drop(self, identity: int) -> None:
        """Forget an id whose node leaves the tree."""
        del self.nodes[identity]
        self.origins.pop(identity, None)

    def settle(self) -> None:
        """After a commit: whatever is not found from now on is dead."""
        self.settled = self.last_id
        self.dead.clear()


class IdTable:
    """The ids of all drafters of a tree."""

    def __init__(self) -> None:
        self.senders: dict[int, SenderIds] = {}
        self._aliases: deque[tuple[int, int, int]] = deque()  # (position, sender, id), oldest first

    def of(self, sender: int) -> SenderIds:
        """Return a drafter's ids; a drafter not seen before has none."""
        return self.senders.setdefault(sender, SenderIds())

    def node(self, sender: int, identity: int) -> Node | None:
        """Return the live node for which a drafter uses the id `identity`, or None."""
        return self.of(sender).nodes.get(identity)

    def name(self, node: Node, sender: int, identity: int) -> None:
        """Record that `sender` uses the id `identity` for the node."""
        node.names.append((sender, identity))
        ids = self.of(sender)
        ids.nodes[identity] = node
        ids.last_id = max(ids.last_id, identity)

    def alias(self, sender: int, identity: int, position: int) -> None:
        """Record that an id stands for the token committed at a position."""
        self.senders[sender].committed[identity] = position
        self._aliases.append((position, sender, identity))

    def commit(self, node: Node) -> None:
        """Turn the ids of a node whose token is committed into aliases of the token."""
        for sender, identity in node.names:
            self.senders[sender].drop(identity)
            self.alias(sender, identity, node.position)

    def remove(self, node: Node) -> None:
        """Forget the ids of a node that leaves the tree."""
        for sender, identity in node.names:
            self.senders[sender].drop(identity)

    def settle(self, oldest: int) -> None:
        """After a commit: ids that are not found are dead, and aliases of positions before `oldest` expire."""
        for ids in self.senders.values():
            ids.settle()
        while self._aliases and self._aliases[0][0] < oldest:
            _, sender, identity = self._aliases.popleft()
            if sender in self.senders:
                self.senders[sender].committed.pop(identity, None)

    def forget(self, sender: int) -> None:
        """Drop a drafter's ids. Its nodes keep their other names."""
        if ids := self.senders.pop(sender, None):
            for node in ids.nodes.values():
                node.names = [name for name in node.names if name[0] != sender]

    def origins(self, node: Node) -> set[int]:
        """Return the drafters that drafted the node."""
        return {self.senders[sender].origins.get(identity, sender) for sender, identity in node.names}

    def check_integrity(self, live: Iterable[Node], oldest: int, last: int) -> None:
        """Raise AssertionError when ids and the tree's `live` nodes contradict one another. For tests."""
        named = {(sender, identity): id(node) for node in live for sender, identity in node.names}
        held = {(sender, i): id(node) for sender, ids in self.senders.items() for i, node in ids.nodes.items()}
        assert named == held
        assert all(oldest <= at <= last for ids in self.senders.values() for at in ids.committed.values())
