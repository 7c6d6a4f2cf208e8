"""The token tree: candidate tokens after the last committed one. A drafter and its upstream each hold a copy.

A node's path score is the product of the edge scores from the root down to it: the drafter's estimate of the
probability that the target chooses exactly this path. A node stores the sum of the logarithms from an arbitrary origin,
and a score subtracts the root's sum, so that re-rooting costs nothing for the nodes that stay.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.core.acceptance.draft_distribution import SparseRow
from outrider.core.session.digest import NOTHING, Prefix, extend
from outrider.errors import InvalidRequest

ALIAS_SPAN = 256  # positions behind the root at which a late node may still become an alias of a committed token


class Node:
    """One proposed token. Nodes are compared by identity."""

    __slots__ = (
        "children",
        "claim",
        "edge",
        "expanded",
        "judged",
        "log_score",
        "names",
        "parent",
        "position",
        "q",
        "row",
        "token",
    )

    def __init__(self, token: int, position: int, parent: Node | None, edge: float) -> None:
        self.token = token
        self.position = position  # absolute: tokens from the session's first one
        self.parent = parent
        self.edge = edge  # log of the probability that this is the target's token if the parent is
        self.log_score: float = edge + (parent.log_score if parent else 0.0)  # from an arbitrary origin
        self.children: dict[int, Node] = {}
        self.names: list[tuple[int, int]] = []  # (sender, id), one for each drafter that sent the node
        self.claim: tuple[int, float] | None = None  # the sender whose edge score counts, and the score that it sent
        self.q: SparseRow | None = None  # the distribution that the children were drawn from, where the rule needs it
        self.row = -1  # cache row of its KV in the model that grows the tree; -1: none
        self.expanded = False  # whether that model has proposed its children
        self.judged = False  # whether the edge score comes from a tier above

    def ancestors(self, root: Node) -> Iterator[Node]:
        """Yield the node itself, its parent, and so on up to, but without, `root`."""
        node = self
        while node is not root:
            yield node
            assert node.parent is not None
            node = node.parent


@dataclass(frozen=True, slots=True)
class Delta:
    """New nodes under one root as a drafter sends them, parents before children."""

    root_position: int
    root_digest: int
    first_id: int  # id of the first node; the others follow in steps of one
    parents: tuple[int, ...]  # id of each node's parent; 0 is the root
    tokens: tuple[int, ...]
    edges: tuple[float, ...]  # logarithms, each a multiple of 1/16
    drawn: tuple[SparseRow, ...] = ()  # each parent's q, in the order of the parents' first children
    origin: str = ""  # the drafter that drafted all nodes, if it is not the sender
    rescored: tuple[tuple[int, float], ...] = ()  # ids sent earlier, with their new edge scores
    version: int = 0  # of `rescored`; a tree ignores scores whose version is not newer than the last
    span: bytes = b""  # the trace span in which the nodes were drafted, where the request is traced


@dataclass(frozen=True, slots=True)
class Hints:
    """The best nodes of an upstream's tree, which it sends to its drafters; parents before children."""

    root_position: int
    parents: tuple[int, ...]  # index of each node's parent among these nodes; -1 is the root
    tokens: tuple[int, ...]
    edges: tuple[float, ...]  # logarithms of the upstream's edge scores


class Grafted(NamedTuple):
    """The outcome of a delta. Nodes in neither list were known already, or contradict the committed tokens."""

    added: list[Node]  # nodes that no drafter had sent before, parents before children
    dropped: list[tuple[int, int]]  # (sender, id) of nodes that are left out although they do not contradict the text


class Drifted(Exception):
    """Raised when the sender's copy of the committed tokens differs from this one. The sender needs a snapshot."""


@dataclass(slots=True)
class _Sender:
    """The state of one drafter's node ids."""

    nodes: dict[int, Node] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)  # id -> position of the committed token that it aliases
    last_id: int = 0
    origins: dict[int, int] = field(default_factory=dict)  # id -> the drafter that drafted it, if not the sender
    version: int = 0  # of the last rescoring
    settled: int = 0  # every id up to this one that has no entry is dead
    dead: set[int] = field(default_factory=set)  # dead ids above `settled`

    def drop_id(self, identity: int) -> None:
        """Forget an id whose node leaves the tree."""
        del self.nodes[identity]
        self.origins.pop(identity, None)


def as_claimed(edge: float) -> float:
    """Return the claimed edge score unchanged."""
    return edge


def settled_prefix(tokens: Sequence[int], known: Prefix = NOTHING) -> Prefix:
    """Return the prefix of `tokens`, with its digest, that a tree over them need not read.

    `known` is a shorter prefix whose digest is known; the time taken is proportional to the tokens behind it.
    """
    length = max(known.length, len(tokens) - ALIAS_SPAN - 1)
    return Prefix(length, extend(known.digest, tokens[known.length : length]))


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
        self._senders: dict[int, _Sender] = {}
        self._aliases: deque[tuple[int, int, int]] = deque()  # (position, sender, id), oldest first
        known = settled_prefix(tokens, known)
        digest = known.digest
        self._tokens: dict[int, int] = {}
        self._digests: dict[int, int] = {}
        for position, token in enumerate(tokens[known.length :], known.length):
            digest = extend(digest, (token,))
            self._tokens[position] = token
            self._digests[position] = digest

    @property
    def known(self) -> Prefix:
        """The shortest prefix of the committed tokens whose digest the tree holds, to begin another tree with."""
        position = next(iter(self._tokens))
        return NOTHING if position == self.root.position else Prefix(position + 1, self._digests[position])

    @property
    def digest(self) -> int:
        """The digest over all committed tokens."""
        return self._digests[self.root.position]

    @property
    def length(self) -> int:
        """The number of committed tokens."""
        return self.root.position + 1

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
        elif edge > child.edge:
            self.rescore(child, edge)
        return child

    def rescore(self, node: Node, edge: float) -> None:
        """Replace a node's edge score and update the path scores below it."""
        stack = [node]
        difference = edge - node.edge
        node.edge = edge
        while stack:
            below = stack.pop()
            below.log_score += difference
            stack.extend(below.children.values())

    def name(self, node: Node, sender: int, identity: int) -> None:
        """Record that `sender` uses the id `identity` for the node."""
        node.names.append((sender, identity))
        entry = self._sender(sender)
        entry.nodes[identity] = node
        entry.last_id = max(entry.last_id, identity)

    def graft(
        self, sender: int, delta: Delta, calibrate: Callable[[float], float] = as_claimed, *, origin: int | None = None
    ) -> Grafted:
        """Add a drafter's nodes. A replayed delta changes nothing.

        `calibrate` maps a claimed edge score to the one to use. `origin` is the drafter that drafted the nodes, if it
        is not the sender. A node that equals a token committed meanwhile becomes an alias of that token, so that the
        node's children stay valid.

        Raises Drifted when the delta's root differs from the committed tokens, and InvalidRequest when the delta is
        malformed: a parent whose id is not smaller than its child's, a root that is not committed, a rescored node that
        was never sent.
        """
        self._check_root(delta)
        entry = self._sender(sender)
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
            if identity <= entry.last_id:
                continue
            entry.last_id = identity
            parent: Node | int | None
            if parent_id == 0:
                parent = delta.root_position
            else:
                parent = entry.nodes.get(parent_id) or entry.committed.get(parent_id)
            if parent == self.root.position:
                parent = self.root
            if isinstance(parent, int):
                if self._tokens.get(parent + 1) == token:
                    self._alias(sender, identity, parent + 1)
                else:
                    entry.dead.add(identity)
            elif parent is None:
                if parent_id <= entry.settled or parent_id in entry.dead:
                    entry.dead.add(identity)
                else:
                    dropped.append((sender, identity))
            elif self._make_room(parent, token, parent.log_score + calibrate(edge), dropped):
                added += self._put(sender, identity, parent, token, edge, calibrate(edge))
                if origin is not None:
                    entry.origins[identity] = origin
            else:
                dropped.append((sender, identity))
        self._rescore_claims(sender, delta, calibrate)
        return Grafted(added, dropped)

    def commit(self, tokens: Sequence[int]) -> list[Node]:
        """Re-root at the last of `tokens`, which follow the present root. Return the nodes that were on the path.

        The subtree below the path stays; every other node is removed. Where the path leaves the tree, the returned list
        ends, and the new root has no children.
        """
        matched: list[Node] = []
        for token in tokens:
            self._advance(token, matched)
        for entry in self._senders.values():
            entry.settled = entry.last_id
            entry.dead.clear()
        self._expire()
        return matched

    def forget(self, sender: int) -> None:
        """Drop a drafter's ids. Its nodes stay in the tree."""
        entry = self._senders.pop(sender, None)
        if entry:
            for node in entry.nodes.values():
                node.names = [name for name in node.names if name[0] != sender]

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
                child.judged = True
            placed.append(child)

    def resume(self, sender: int, last_id: int) -> None:
        """Continue with a drafter whose nodes another tree held: all its ids up to `last_id` are dead here."""
        entry = self._sender(sender)
        entry.last_id = entry.settled = last_id

    def last_id(self, sender: int) -> int:
        """Return the largest id received from a drafter."""
        return self._sender(sender).last_id

    def origins(self, node: Node) -> set[int]:
        """Return the drafters that drafted the node."""
        return {self._senders[sender].origins.get(identity, sender) for sender, identity in node.names}

    def node(self, sender: int, identity: int) -> Node | None:
        """Return the live node for which a drafter uses the id `identity`, or None."""
        return self._sender(sender).nodes.get(identity)

    def remove(self, node: Node) -> None:
        """Remove a node and its subtree."""
        assert node.parent is not None
        del node.parent.children[node.token]
        self._discard_subtree(node)

    def best_first(self, *, depth: int, width: int) -> Iterator[tuple[float, Node]]:
        """Yield path scores and nodes, best first, hence parents before children.

        Only the `width` best children of a node and nodes at most `depth` levels below the root are yielded.

        Source: OPT-Tree (Wang et al., arXiv 2406.17276), section 3: any prefix of this order maximises the sum of
        path scores, which is the expected number of accepted tokens, among all trees of its size.
        """
        last = self.root.position + depth
        origin = self.root.log_score
        order = 0
        heap: list[tuple[float, int, Node]] = []

        def push(parent: Node) -> None:
            nonlocal order
            if parent.position >= last or not parent.children:
                return
            children = list(parent.children.values())
            if len(children) > width:
                children = heapq.nlargest(width, children, key=lambda child: child.edge)
            for child in children:
                order += 1
                heapq.heappush(heap, (origin - child.log_score, order, child))

        push(self.root)
        while heap:
            cost, _, node = heapq.heappop(heap)
            yield math.exp(-cost), node
            push(node)

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
        count = 0
        stack = [self.root]
        live = set()
        while stack:
            node = stack.pop()
            live.add(id(node))
            for token, child in node.children.items():
                count += 1
                assert child.token == token
                assert child.parent is node
                assert child.position == node.position + 1
                assert abs(child.log_score - node.log_score - child.edge) < 1e-9
                for sender, identity in child.names:
                    assert self._senders[sender].nodes[identity] is child
                stack.append(child)
        assert count == self.size
        for entry in self._senders.values():
            assert all(id(node) in live for node in entry.nodes.values())
            assert all(self.root.position - ALIAS_SPAN <= at <= self.root.position for at in entry.committed.values())

    def _sender(self, sender: int) -> _Sender:
        return self._senders.setdefault(sender, _Sender())

    def _check_root(self, delta: Delta) -> None:
        if not 0 <= delta.root_position <= self.root.position:
            raise InvalidRequest(
                "root_position",
                f"is {delta.root_position}, must be 0 to {self.root.position}, the last committed",
            )
        known = self._digests.get(delta.root_position)
        if known is not None and known != delta.root_digest:
            raise Drifted(f"at position {delta.root_position}")

    def _advance(self, token: int, matched: list[Node]) -> None:
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
            for sender, identity in child.names:
                self._senders[sender].drop_id(identity)
                self._alias(sender, identity, child.position)
            child.parent = None
        self.root = child
        self._tokens[child.position] = token
        self._digests[child.position] = extend(self._digests[old.position], (token,))

    def _put(self, sender: int, identity: int, parent: Node, token: int, claimed: float, edge: float) -> list[Node]:
        """Add a sender's node. Return it in a list if no drafter had sent it before, else return an empty list."""
        known = parent.children.get(token) if parent.expanded else None  # the score by the tree's own model stands
        child = known or self.add(parent, token, edge)
        if child.edge == edge and not known:
            child.claim = sender, claimed
        new = not child.names
        self.name(child, sender, identity)
        return [child] if new else []

    def _rescore_claims(self, sender: int, delta: Delta, calibrate: Callable[[float], float]) -> None:
        """Apply a sender's new scores of its nodes, except where another sender's score counts and is higher."""
        entry = self._sender(sender)
        if delta.version <= entry.version:
            return
        entry.version = delta.version
        for identity, claimed in delta.rescored:
            if identity > entry.last_id:
                raise InvalidRequest("rescored", f"names node {identity}, which was not sent")
            node, edge = entry.nodes.get(identity), calibrate(claimed)
            if node is not None and (node.claim is None or node.claim[0] == sender or edge > node.edge):
                self.rescore(node, edge)
                node.claim = sender, claimed

    def _make_room(self, parent: Node, token: int, log_score: float, dropped: list[tuple[int, int]]) -> bool:
        """Return whether a child of that score fits, removing the worst leaf if needed. Add that leaf's ids to
        `dropped`."""
        if self.size < self.capacity or token in parent.children:
            return True
        worst = min(self._leaves(), key=lambda leaf: leaf.log_score)
        if worst.log_score >= log_score or worst is parent:
            return False
        dropped += worst.names
        self.remove(worst)
        return True

    def _leaves(self) -> Iterator[Node]:
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and node is not self.root:
                yield node

    def _alias(self, sender: int, identity: int, position: int) -> None:
        self._senders[sender].committed[identity] = position
        self._aliases.append((position, sender, identity))

    def _discard_subtree(self, top: Node) -> None:
        stack = [top]
        while stack:
            node = stack.pop()
            self.size -= 1
            for sender, identity in node.names:
                self._senders[sender].drop_id(identity)
            stack.extend(node.children.values())

    def _expire(self) -> None:
        oldest = self.root.position - ALIAS_SPAN
        while (position := next(iter(self._tokens))) < oldest:  # in order of insertion, hence of position
            del self._tokens[position], self._digests[position]
        while self._aliases and self._aliases[0][0] < oldest:
            _, sender, identity = self._aliases.popleft()
            if sender in self._senders:
                self._senders[sender].committed.pop(identity, None)
