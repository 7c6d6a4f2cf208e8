"""A node of a token tree."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.core.acceptance.draft_distribution import SparseRow


class Node:
    """One proposed token. Nodes are compared by identity."""

    __slots__ = (
        "children",
        "claim",
        "edge",
        "expanded",
        "log_score",
        "names",
        "parent",
        "position",
        "q",
        "rescored",
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
        self.rescored = False  # whether the edge score comes from a tier above

    def ancestors(self, root: Node) -> Iterator[Node]:
        """Yield the node itself, its parent, and so on up to, but without, `root`."""
        node = self
        while node is not root:
            yield node
            assert node.parent is not None
            node = node.parent

    def subtree(self) -> Iterator[Node]:
        """Yield the node itself and all nodes below it, parents before children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
