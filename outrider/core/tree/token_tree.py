"""The token tree: candidate tokens after the last committed one. A drafter and its upstream each hold a copy.

A node's path score is the product of the edge scores from the root down to it: the drafter's estimate of the
probability that the target chooses exactly this path. A node stores the sum of the logarithms from an arbitrary origin,
and a score subtracts the root's sum, so that re-rooting costs nothing for the nodes that stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from outrider.core.session.digest import NOTHING, Prefix
from outrider.core.tree.committed_window import ALIAS_SPAN, CommittedWindow
from outrider.core.tree.delta import Delta, Hints
from outrider.core.tree.node import Node
from outrider.core.tree.ranking import Ranking, best_first
from outrider.core.tree.sender_ids import IdTable, SenderIds
from outrider.errors import InvalidRequest


class GraftResult(NamedTuple):
    """The outcome of a delta. Nodes in neither list were known already, or contradict the committed tokens."""

    added: list[Node]  # nodes that no drafter had sent before, parents before children
    dropped: list[tuple[int, int]]  # (sender, id) of nodes that are left out although they do not contradict the text


def as_claimed(edge: float) -> float:
    """Return the claimed edge score unchanged."""
    return edge


class TokenTree:
    """One session's tree over its committed tokens.

    The tree holds at most `capacity` nodes. When it is full, a better node replaces the leaf with the lowest score.
    """

    def __init__(self, tokens: Sequence[int], *, capacity: int = 1024, known: Prefix = NOTHING) -> None:
        """Begin an empty tree over `tokens`, the session's committed tokens. Raises InvalidRequest when there are none.

        `known` is a prefix of `tokens` whose digest is known. With the prefix that `settled_prefix` returns, the start
        takes constant time however long the text is. The tree cannot alias late nodes at positions within `known`.
        """
        if not tokens:
            raise InvalidRequest("tokens", "a session needs at least one token before it can be continued")
        self.capacity = capacity
        self.size = 0
        self.root = Node(tokens[-1], len(tokens) - 1, None, 0.0)
        self.ids = IdTable()
        self.committed = CommittedWindow(tokens, known)
        self._ranking: Ranking | None = None  # of the tree as it is; None after a change

    @property
    def digest(self) -> int:
        """The digest over all committed tokens."""
        return self.committed.digest

    def score(self, node: Node) -> float:
        """Return the node's path score, 0 to 1."""
        return math.exp(node.log_score - self.root.log_score)

    def path(self, node: Node) -> list[int]:
        """Return the tokens below the root, down to the node's own."""
        return [above.token for above in node.ancestors(self.root)][::-1]

    def depth(self, node: Node) -> int:
        """Return how many levels the node is below the root."""
        return node.position - self.root.position

    def holds(self, node: Node) -> bool:
        """Return whether the node is the root or below it and was not removed."""
        while node is not self.root:
            if node.parent is None or node.parent.children.get(node.token) is not node:
                return False
            node = node.parent
        return True

    def add(self, parent: Node, token: int, edge: float) -> Node:
        """Return the child of `parent` with `token`, adding it if needed. An existing child keeps the larger edge
        score."""
        child = parent.children.get(token)
        if child is None:
            child = parent.children[token] = Node(token, parent.position + 1, parent, edge)
            self.size += 1
            self._ranking = None
        elif edge > child.edge:
            self.rescore(child, edge)
        return child

    def rescore(self, node: Node, edge: float) -> None:
        """Replace a node's edge score and update the path scores below it."""
        self._ranking = None
        difference = edge - node.edge
        node.edge = edge
        for below in node.subtree():
            below.log_score += difference

    def graft(
        self, sender: int, delta: Delta, calibrate: Callable[[float], float] = as_claimed, *, origin: int | None = None
    ) -> GraftResult:
        """Add a drafter's nodes. A replayed delta changes nothing.

        `calibrate` maps a claimed edge score to the one to use. `origin` is the drafter that drafted the nodes, if it
        is not the sender. A node that equals a token committed meanwhile becomes an alias of that token, so that the
        node's children stay valid.

        Raises DigestMismatch when the delta's root differs from the committed tokens, and InvalidRequest when the delta
        is malformed: a parent whose id is not smaller than its child's, a root that is not committed, a rescored node
        that was never sent.
        """
        self.committed.check_root(delta.root_position, delta.root_digest)
        ids = self.ids.of(sender)
        added: list[Node] = []
        dropped: list[tuple[int, int]] = []
        for identity, parent_id, token, edge in zip(
            range(delta.first_id, delta.first_id + len(delta.tokens)),
            delta.parents,
            delta.tokens,
            delta.edges,
            strict=True,
        ):
            if parent_id >= identity or parent_id < 0:
                raise InvalidRequest("parents", f"node {identity} names parent {parent_id}, which is not older")
            if identity <= ids.last_id:
                continue
            ids.last_id = identity
            parent = ids.find(parent_id) if parent_id else delta.root_position
            if parent == self.root.position:
                parent = self.root
            if isinstance(parent, int):
                if self.committed.token(parent + 1) == token:
                    self.ids.alias(sender, identity, parent + 1)
                else:
                    ids.dead.add(identity)
            elif parent is None:
                if ids.is_dead(parent_id):
                    ids.dead.add(identity)
                else:
                    dropped.append((sender, identity))
            elif self._make_room(parent, token, parent.log_score + calibrate(edge), dropped):
                added += self._put(sender, identity, parent, token, edge, calibrate(edge))
                if origin is not None:
                    ids.origins[identity] = origin
            else:
                dropped.append((sender, identity))
        self._rescore_claims(sender, ids, delta, calibrate)
        return GraftResult(added, dropped)

    def commit(self, tokens: Sequence[int]) -> list[Node]:
        """Re-root at the last of `tokens`, which follow the present root. Return the nodes that were on the path.

        The subtree below the path stays; every other node is removed. Where the path leaves the tree, the returned list
        ends, and the new root has no children.
        """
        matched: list[Node] = []
        for token in tokens:
            self._advance(token, matched)
        self.ids.settle(self.committed.expire())
        return matched

    def hint(self, hints: Hints) -> None:
        """Apply an upstream's edge scores to the nodes below this root, and add missing nodes while there is room.

        Hints under another root change nothing.
        """
        if hints.root_position != self.root.position:
            return
        placed: list[Node | None] = []
        for above, token, edge in zip(hints.parents, hints.tokens, hints.edges, strict=True):
            parent = placed[above] if above >= 0 else self.root
            child = parent.children.get(token) if parent else None
            if child is not None:
                self.rescore(child, edge)
            elif parent is not None and self.size < self.capacity:
                child = self.add(parent, token, edge)
            if child is not None:
                child.rescored = True
            placed.append(child)

    def remove(self, node: Node) -> None:
        """Remove a node and its subtree."""
        assert node.parent is not None
        del node.parent.children[node.token]
        self._discard_subtree(node)

    def best_first(self, *, depth: int, width: int) -> Iterator[tuple[float, Node]]:
        """Yield path scores and nodes, best first; see `ranking.best_first`."""
        return best_first(self.root, depth=depth, width=width)

    def best(self, count: int, *, depth: int, width: int) -> list[tuple[float, Node]]:
        """Return the first `count` of `best_first`, or all if there are fewer. It costs nothing to ask again while the
        tree is the same."""
        if self._ranking is None or (self._ranking.depth, self._ranking.width) != (depth, width):
            self._ranking = Ranking(self.root, depth=depth, width=width)
        return self._ranking.first(count)

    def levels(self) -> Iterator[list[Node]]:
        """Yield the nodes at depth 1, 2, and so on. Siblings stand side by side, in the order in which they were
        added."""
        level = list(self.root.children.values())
        while level:
            yield level
            level = [child for node in level for child in node.children.values()]

    def claimants(self) -> set[int]:
        """Return the senders whose edge score counts for some node, including senders that were forgotten since."""
        return {node.claim[0] for level in self.levels() for node in level if node.claim}

    def check_integrity(self) -> None:
        """Raise AssertionError when the tree's data structures contradict one another. For tests."""
        live = [*self.root.subtree()]
        for node in live:
            for token, child in node.children.items():
                assert child.token == token
                assert child.parent is node
                assert child.position == node.position + 1
                assert abs(child.log_score - node.log_score - child.edge) < 1e-9
        assert len(live) == self.size + 1
        assert self.committed.last == self.root.position
        self.ids.check_integrity(live[1:], self.root.position - ALIAS_SPAN, self.root.position)

    def _advance(self, token: int, matched: list[Node]) -> None:
        self._ranking = None
        old = self.root
        child = old.children.pop(token, None)
        for sibling in old.children.values():
            self._discard_subtree(sibling)
        old.children.clear()
        if child is None:
            child = Node(token, old.position + 1, None, 0.0)
        else:
            self.size -= 1
            matched.append(child)
            self.ids.commit(child)
            child.parent = None
        self.root = child
        self.committed.append(token)

    def _put(self, sender: int, identity: int, parent: Node, token: int, claimed: float, edge: float) -> list[Node]:
        """Add a sender's node. Return it in a list if no drafter had sent it before, else return an empty list."""
        known = parent.children.get(token) if parent.expanded else None  # the score by the tree's own model stands
        child = known or self.add(parent, token, edge)
        if child.edge == edge and not known:
            child.claim = sender, claimed
        new = not child.names
        self.ids.name(child, sender, identity)
        return [child] if new else []

    def _rescore_claims(self, sender: int, ids: SenderIds, delta: Delta, calibrate: Callable[[float], float]) -> None:
        """Apply a sender's new scores of its nodes, except where another sender's score counts and is higher."""
        if delta.version <= ids.version:
            return
        ids.version = delta.version
        for identity, claimed in delta.rescored:
            if identity > ids.last_id:
                raise InvalidRequest("rescored", f"names node {identity}, which was not sent")
            node, edge = ids.nodes.get(identity), calibrate(claimed)
            if node is not None and (node.claim is None or node.claim[0] == sender or edge > node.edge):
                self.rescore(node, edge)
                node.claim = sender, claimed

    def _make_room(self, parent: Node, token: int, log_score: float, dropped: list[tuple[int, int]]) -> bool:
        """Return whether a child of that score fits, removing the worst leaf if needed. Add that leaf's ids to
        `dropped`."""
        if self.size < self.capacity or token in parent.children:
            return True
        leaves = (node for node in self.root.subtree() if not node.children and node is not self.root)
        worst = min(leaves, key=lambda leaf: leaf.log_score)
        if worst.log_score >= log_score or worst is parent:
            return False
        dropped += worst.names
        self.remove(worst)
        return True

    def _discard_subtree(self, top: Node) -> None:
        self._ranking = None
        for node in top.subtree():
            self.size -= 1
            self.ids.remove(node)
