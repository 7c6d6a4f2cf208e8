"""One session on a drafter that has a model: which KV that holds, and what it runs next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drafter_svc.replica import Replica, Snapshot
from outrider.core.construction import Construction, Terms
from outrider.core.growth import Fits
from outrider.core.noise import Draw
from outrider.core.sampler import Sampler
from outrider.core.tree import Delta, Node
from outrider.engine.batch import Segment
from outrider.engine.logits import Row


@dataclass(frozen=True, slots=True)
class Move:
    """Cache rows that go somewhere else after a commit."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]


class DraftSession(Replica, ABC):
    """One session's tree and KV; how the tree grows is left to its kinds.

    Cache rows [0, cached) hold committed tokens; `scratch` says which node's KV the rows behind them hold, oldest
    first. A node has KV if and only if it is expanded.

    Target and model may have different numbers of ids. What is drafted has ids below `usable`, which both have. Where
    the model lacks one, of a committed token or of a node from elsewhere, it reads its own last one.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        slot: int,
        vocabulary: int,
        construction: Construction,
        *,
        first_id: int = 1,
        cached: int = 0,
    ) -> None:
        """`vocabulary`: ids of the model."""
        super().__init__(snapshot, first_id=first_id)
        self.usable = min(vocabulary, self.sayable)
        self.construction = construction
        self.slot = slot
        self.level_price = 0.0  # tokens that the time of one more level costs, while the upstream waits
        self.cached = cached
        self.scratch: list[Node] = []
        self.sampler = Sampler(snapshot.contract, self.usable, self.tokens, snapshot.answer_position)
        self._last_id = vocabulary - 1
        self._mute = not snapshot.contract.allows_any(self.usable)

    def commit(self, tokens: Sequence[int]) -> Move | None:
        """Follows the target. Returns the cache rows to move so that what is still good stays in order."""
        matched = self._re_root(tokens)
        self.tokens.extend(tokens)
        self.sampler.extend(tokens)
        kept = [node for node in matched if node.expanded]
        survivors = kept + self._expanded_below(self.tree.root)
        rows = np.array([node.row for node in survivors], dtype=np.int64)
        target = self.cached + np.arange(len(survivors), dtype=np.int64)
        for node, row in zip(survivors, target, strict=True):
            node.row = int(row)
        self.cached += len(kept)
        self.scratch = survivors[len(kept) :]
        moved = rows != target
        return Move(rows[moved], target[moved]) if moved.any() else None

    @property
    def behind(self) -> bool:
        """Whether it has to read on in its text before it can propose all that it could."""
        return False

    def read_on(self, most: int) -> int:
        """Reads at most so many tokens more. Returns how many."""
        return 0

    def forget(self) -> bool:
        """All KV is gone. False: the session has to begin anew; what it has drafted stays good at the upstream."""
        self.cached = 0
        self.scratch = []
        return False

    def next_segment(
        self, fits: Fits, *, chunk: int, limit: int, context: int, rows: int, level_s: float = 0.0
    ) -> tuple[Segment, list[Node]] | None:
        """What to run next: a chunk of committed tokens, or the rest of them with the nodes to expand.

        Also returns the nodes that the segment's last rows expand. None when there is nothing worth doing: nothing that
        is worth its price, or, while the upstream waits, the `level_s` seconds that it takes. At a price of 1 not even
        the prompt is read.
        """
        pending = len(self.tokens) - self.cached
        if len(self.tokens) >= context or not self.wanted or self._mute:
            return None
        if pending > chunk:
            return self._chain(chunk, wanted=0), []
        limit = min(limit, self.room // max(1, self.plan.width), rows - len(self.tokens) - len(self.scratch))
        if limit <= 0:
            return None
        self.level_price = self.time_price * level_s
        nodes = [node for node in self.frontier(fits, limit) if node.position + 1 < context]
        if not nodes or self.gain(fits, nodes) < self.level_price:
            return None
        return self._level(pending, nodes), nodes

    @abstractmethod
    def frontier(self, fits: Fits, limit: int) -> list[Node]:
        """The nodes to expand next, at most `limit`, parents before children; the root first if it is one of them."""

    @abstractmethod
    def gain(self, fits: Fits, nodes: Sequence[Node]) -> float:
        """Tokens that expanding these nodes is expected to bring, less what verifying their children costs."""

    @abstractmethod
    def expand(self, nodes: Sequence[Node], rows: Sequence[Row], fits: Fits) -> Delta:
        """Proposes the children of `nodes`, from what the draft says after each. Returns what is new, as the upstream
        is to hear it."""

    @property
    def draw(self) -> Draw | None:
        """How candidates are ranked, where an engine could do it: as the target's tokens are drawn."""
        return None

    def judge(self, nodes: Sequence[Node], fits: Fits) -> None:
        """Gives nodes that a lower tier has drafted what this model thinks of them, if it knows."""

    @abstractmethod
    def refill(self, fits: Fits) -> Delta:
        """What can be proposed without a pass, after a commit or new terms."""

    @abstractmethod
    def rest(self, fits: Fits) -> Delta:
        """What was held back until now that nothing more is run before the next commit."""

    @abstractmethod
    def learn(self, fits: Fits) -> None:
        """Fits the scores to what the target said."""

    @abstractmethod
    def _re_root(self, tokens: Sequence[int]) -> list[Node]:
        """Follows the target in the tree. Returns the nodes that were on the path; they keep their KV if expanded."""

    def advance(self, segment: Segment, nodes: Sequence[Node]) -> None:
        """The pass over `segment` is done: its rows hold KV now."""
        added = [node for node in nodes if node is not self.tree.root]
        self.cached += len(segment.tokens) - len(added)
        for node in added:
            node.row = self.cached + len(self.scratch)
            self.scratch.append(node)

    def _terms(self, rates: Sequence[float], limit: int = 2**31) -> Terms:
        """What the tree's construction is bound by. `rates`: measured acceptance by rank."""
        return Terms(self.plan, limit, self.price, self.ahead, self.level_price, tuple(rates))

    def _expanded_below(self, root: Node) -> list[Node]:
        """Expanded nodes of the kept subtree in the order of their cache rows: ancestors come before descendants."""
        found = []
        stack = [child for child in root.children.values() if child.expanded]
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(child for child in node.children.values() if child.expanded)
        return sorted(found, key=_row_of)

    def _chain(self, count: int, wanted: int) -> Segment:
        tokens = self._read(self.tokens[self.cached : self.cached + count])
        positions = np.arange(self.cached, self.cached + count, dtype=np.int64)
        return Segment(self.slot, self.cached, tokens, positions, None, wanted)

    def _level(self, pending: int, nodes: Sequence[Node]) -> Segment:
        """The pending tokens as a chain, and the nodes behind it. With tokens pending there is no scratch, and the last
        of them is the root, which is then the first of `nodes`."""
        below = nodes[1:] if pending else nodes
        if not below:
            return self._chain(pending, wanted=1)
        held, count = pending + len(self.scratch), len(below)
        rows = {node: held + row for row, node in enumerate(below)}
        seen = np.zeros((count, held + count), dtype=np.bool_)
        seen[:, :pending] = True
        for row, node in enumerate(below):
            for ancestor in node.ancestors(self.tree.root):
                seen[row, rows[ancestor] if ancestor in rows else ancestor.row - self.cached] = True
        chain = np.tri(pending, held + count, dtype=np.bool_)
        tokens = self.tokens[self.cached :] + [node.token for node in below]
        positions = [*range(self.cached, len(self.tokens)), *(node.position for node in below)]
        return Segment(
            self.slot, self.cached, self._read(tokens), np.array(positions), np.concatenate([chain, seen]), len(nodes)
        )

    def _read(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """The tokens as the model can read them."""
        return np.minimum(np.array(tokens, dtype=np.int64), self._last_id)


def _row_of(node: Node) -> int:
    return node.row
