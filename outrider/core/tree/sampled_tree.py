"""The tree of a session whose acceptance rule compares p with q. Its nodes are drawn anew for every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.session.contract import Contract
from outrider.core.session.digest import NOTHING, Prefix
from outrider.core.tree.delta import Delta, Hints
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import GraftResult, TokenTree, as_claimed
from outrider.errors import InvalidRequest


def tree_of(contract: Contract, tokens: Sequence[int], *, capacity: int = 1024, known: Prefix = NOTHING) -> TokenTree:
    """Return an empty tree over the committed tokens, of the class that the contract's rule needs.

    For `known` and the errors raised see `TokenTree`.
    """
    kind = SampledTree if rule_of(contract).child_sampling is ChildSampling.SAMPLED else TokenTree
    return kind(tokens, capacity=capacity, known=known)


class SampledTree(TokenTree):
    """A tree whose nodes were drawn from the q that their parent holds.

    No node outlives a commit: which nodes are in the tree depends on the draws that the commit has used, and the rules
    need fresh draws.
    """

    def graft(
        self, sender: int, delta: Delta, calibrate: Callable[[float], float] = as_claimed, *, origin: int | None = None
    ) -> GraftResult:
        """Add drawn children, with the q of each parent: all children of a node at once, in the order of the draws.

        A delta under an earlier root adds nothing. Raises what `TokenTree.graft` raises, and InvalidRequest for
        children that cannot have been drawn from their q, or that arrive in several parts.
        """
        self.committed.check_root(delta.root_position, delta.root_digest)
        ids = self.ids.of(sender)
        if delta.first_id <= ids.last_id:
            return GraftResult([], [])
        new = range(delta.first_id, delta.first_id + len(delta.tokens))
        ids.last_id = max(ids.last_id, new.stop - 1)
        if delta.root_position != self.root.position:
            return GraftResult([], [])
        added: list[Node] = []
        rows = iter(delta.drawn)
        opened: set[int] = set()
        for identity, parent_id, token, edge in zip(new, delta.parents, delta.tokens, delta.edges, strict=True):
            parent = ids.nodes.get(parent_id) if parent_id else self.root
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
            added += self._put(sender, identity, parent, token, edge, calibrate(edge))
        if next(rows, None) is not None:
            raise InvalidRequest("drawn", "has more rows than the delta's nodes have parents")
        return GraftResult(added, [])

    def hint(self, hints: Hints) -> None:
        """Do nothing: every node of this tree must have been drawn."""

    def commit(self, tokens: Sequence[int]) -> list[Node]:
        """Re-root at the last of `tokens` and drop all other nodes. Return the nodes that were on the path."""
        matched = super().commit(tokens)
        for child in self.root.children.values():
            self._discard_subtree(child)
        self.root.children.clear()
        self.root.q = None
        return matched
