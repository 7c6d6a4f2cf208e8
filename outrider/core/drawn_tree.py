"""The tree of a session whose rule holds p against q: drawn anew for every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.core.contract import Contract
from outrider.core.digest import NOTHING, Prefix
from outrider.core.rules import Drawn, rule_of
from outrider.core.tree import Delta, Grafted, Hints, Node, TokenTree, believe
from outrider.errors import InvalidRequest


def tree_of(contract: Contract, tokens: Sequence[int], *, capacity: int = 1024, known: Prefix = NOTHING) -> TokenTree:
    """The tree that a contract's rule wants, over the committed tokens. `known`, and what is raised: as by the tree."""
    kind = DrawnTree if rule_of(contract).drawn is Drawn.SAMPLED else TokenTree
    return kind(tokens, capacity=capacity, known=known)


class DrawnTree(TokenTree):
    """Its nodes were drawn from the q that their parent holds. None outlives a commit: what is there is there by
    chance, that of what was said, and a further draw must be fresh."""

    def graft(
        self, sender: int, delta: Delta, judge: Callable[[float], float] = believe, *, origin: int | None = None
    ) -> Grafted:
        """Adds children that were drawn, with the q of each parent: all children of a node at once, in order.

        What was drawn under a root that has been left behind is passed over. Raises as any tree, and InvalidRequest for
        children that cannot have been drawn from their q, or that come in several parts.
        """
        self._check_root(delta)
        entry = self._sender(sender)
        ids = range(delta.first_id, delta.first_id + len(delta.tokens))
        if delta.first_id <= entry.last_id:
            return Grafted([], [])
        entry.last_id = max(entry.last_id, delta.first_id + len(delta.tokens) - 1)
        if delta.root_position != self.root.position:
            return Grafted([], [])
        added: list[Node] = []
        rows = iter(delta.drawn)
        opened: set[int] = set()
        for identity, parent_id, token, edge in zip(ids, delta.parents, delta.tokens, delta.edges, strict=True):
            parent = entry.nodes.get(parent_id) if parent_id else self.root
            if parent is None:
                raise InvalidRequest("parents", f"node {identity} names parent {parent_id}, which is not there")
            if parent_id not in opened:
                if parent.children:
                    raise InvalidRequest("parents", f"node {parent_id} gets more children; they must come at once")
                opened.add(parent_id)
                parent.q = next(rows, None)
            if parent.q is None or token not in parent.q.tokens or token in parent.children:
                raise InvalidRequest("drawn", f"node {identity} cannot have been drawn from its parent's distribution")
            if self.size >= self.capacity:
                raise InvalidRequest("tokens", f"the tree is full; it holds {self.capacity} nodes")
            added += self._put(sender, identity, parent, token, edge, judge(edge))
        if next(rows, None) is not None:
            raise InvalidRequest("drawn", "has more rows than the delta's nodes have parents")
        return Grafted(added, [])

    def hint(self, hints: Hints) -> None:
        """Not taken: what is in the tree must have been drawn."""

    def commit(self, tokens: Sequence[int]) -> list[Node]:
        """Re-roots, and drops all that is left. Returns the nodes that were on the path."""
        matched = super().commit(tokens)
        for child in self.root.children.values():
            self._bury(child)
        self.root.children.clear()
        self.root.q = None
        return matched
