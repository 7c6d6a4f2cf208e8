"""One session on a drafter that has a model: the KV that its slot holds, and the segment that it runs next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drafter_svc.sessions.mirror import Mirror
from outrider.core.construction import Construction, TreeTerms
from outrider.core.construction.expansion import DrafterFits
from outrider.core.sampling.noise import Draw
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.snapshot import MirrorSnapshot
from outrider.core.tree.delta import Delta
from outrider.core.tree.node import Node
from outrider.engine.growth import GrownLevel, Growth
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Traits
from outrider.engine.interface.logits import LogitsRow
from outrider.engine.interface.masks import path_mask


@dataclass(frozen=True, slots=True)
class KvMove:
    """Cache rows to move after a commit."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]


class DrafterSession(Mirror, ABC):
    """One session's tree and KV; subclasses decide how the tree grows.

    Cache rows [0, cached) hold committed tokens; `scratch` names the nodes whose KV the rows behind them hold, oldest
    first. A node has KV if and only if it is expanded.

    Target and model may have different numbers of ids. Drafted nodes have ids below `usable`, which both have. Where a
    committed token or another drafter's node has an id that the model lacks, the model reads its own last id.
    """

    def __init__(
        self,
        snapshot: MirrorSnapshot,
        slot: int,
        vocabulary: int,
        construction: Construction,
        *,
        first_id: int = 1,
        cached: int = 0,
    ) -> None:
        """`vocabulary`: ids of the model."""
        super().__init__(snapshot, first_id=first_id)
        self.usable = min(vocabulary, self.unpadded_vocabulary)
        self.construction = construction
        self.slot = slot
        self.adapter: object | None = None  # of the model
        self.level_cost_tokens = 0.0  # tokens that one more level costs while the upstream waits
        self.cached = cached
        self.scratch: list[Node] = []
        self.sampler = Sampler(snapshot.contract, self.usable, self.tokens, snapshot.answer_position)
        self._last_id = vocabulary - 1
        self._cannot_draft = not snapshot.contract.allows_any(self.usable)

    def commit(self, tokens: Sequence[int]) -> KvMove | None:
        """Re-roots the tree by committed tokens. Return the rows to move so that valid KV stays in order."""
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
        return KvMove(rows[moved], target[moved]) if moved.any() else None

    @property
    def behind(self) -> bool:
        """Whether the session has to read more of its text before it can propose all that it could."""
        return False

    def read_on(self, limit: int) -> int:
        """Read at most `limit` more tokens. Return how many it read."""
        return 0

    def drop_kv(self) -> bool:
        """Drop all KV. Return False if the session must restart from a snapshot; its nodes stay valid at the
        upstream.
        """
        self.cached = 0
        self.scratch = []
        return False

    def next_segment(
        self, fits: DrafterFits, *, chunk: int, limit: int, context: int, rows: int, level_s: float = 0.0
    ) -> tuple[Segment, list[Node]] | None:
        """Return the segment to run next, and the nodes that its last rows expand; None if nothing is worth running.

        The segment is a chunk of committed tokens, or the rest of them with the nodes to expand. A level must be worth
        its rows and, while the upstream waits, its `level_s` seconds. While drafters rest no prompt is read either.
        """
        pending = len(self.tokens) - self.cached
        if len(self.tokens) >= context or not self.worth_drafting or self._cannot_draft:
            return None
        if pending > chunk:
            return self._chain(chunk, wanted=0), []
        limit = min(limit, self.room // max(1, self.plan.width), rows - len(self.tokens) - len(self.scratch))
        if limit <= 0:
            return None
        self.level_cost_tokens = self.terms.time_cost_tokens_per_s * level_s
        nodes = [node for node in self.frontier(fits, limit) if node.position + 1 < context]
        if not nodes or self.gain(fits, nodes) < self.level_cost_tokens:
            return None
        return self._level(pending, nodes), nodes

    @abstractmethod
    def frontier(self, fits: DrafterFits, limit: int) -> list[Node]:
        """Return at most `limit` nodes to expand next, parents before children; the root, if included, comes first."""

    @abstractmethod
    def gain(self, fits: DrafterFits, nodes: Sequence[Node]) -> float:
        """Return the tokens that expanding these nodes is expected to bring, less the cost of verifying children."""

    @abstractmethod
    def expand(self, nodes: Sequence[Node], rows: Sequence[LogitsRow], fits: DrafterFits) -> Delta:
        """Proposes the children of `nodes` from the draft's logits after each. Return the new nodes as a delta."""

    def draw(self, engine: Traits) -> Draw | None:
        """Return how an engine may rank candidates: as the target's tokens are drawn. None: it may not."""
        return None

    def growth(
        self, fits: DrafterFits, segment: Segment, nodes: Sequence[Node], beside: int
    ) -> tuple[Growth, int] | None:
        """Return how an engine may grow the tree behind a level, and how many levels are worth running. None: it grows
        level by level.

        `beside`: the most levels while no step waits for the tree, and so a commit may arrive.
        """
        return None

    def add_level(self, numbered: list[Node | None], level: GrownLevel, tree: int, fits: DrafterFits) -> Delta:
        """Proposes the children of a level that the engine has grown. `numbered`: the nodes of the rows before, which
        it extends; `tree`: the tree's index in the level. Only where `growth` is not None.
        """
        raise NotImplementedError

    def rescore(self, nodes: Sequence[Node], fits: DrafterFits) -> None:
        """Scores nodes that a lower tier has drafted by this model, if their parents' rows are known."""

    def refill(self, fits: DrafterFits) -> Delta:
        """Return nodes that can be proposed without a pass, after a commit or new terms."""
        return self.announce(())

    def flush(self, fits: DrafterFits) -> Delta:
        """Return the nodes that were held back, because no more passes are run before the next commit."""
        return self.announce(())

    @abstractmethod
    def learn(self, fits: DrafterFits) -> None:
        """Fits the scores to the tokens that the target chose."""

    @abstractmethod
    def _re_root(self, tokens: Sequence[int]) -> list[Node]:
        """Re-roots the tree. Return the nodes on the committed path; expanded ones keep their KV."""

    def advance(self, segment: Segment, nodes: Sequence[Node]) -> None:
        """Record that the rows of `segment` hold KV, after its pass."""
        added = [node for node in nodes if node is not self.tree.root]
        self.cached += len(segment.tokens) - len(added)
        self._hold(added)

    def _hold(self, nodes: Sequence[Node]) -> None:
        """Record that the next cache rows hold the KV of these nodes."""
        for node in nodes:
            node.row = self.cached + len(self.scratch)
            self.scratch.append(node)

    def _terms(self, rates: Sequence[float], limit: int = 2**31) -> TreeTerms:
        """Return the bounds of the tree's construction. `rates`: measured acceptance by rank."""
        min_path_score, _, ahead = self.terms
        return TreeTerms(self.plan, limit, min_path_score, ahead, self.level_cost_tokens, tuple(rates))

    def _expanded_below(self, root: Node) -> list[Node]:
        """Return the expanded nodes of the kept subtree in the order of their rows: ancestors before descendants."""
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
        return Segment(self.slot, self.cached, tokens, positions, None, wanted, self.adapter)

    def _level(self, pending: int, nodes: Sequence[Node]) -> Segment:
        """Return the pending tokens as a chain, and the nodes behind it. With pending tokens there is no scratch, and
        the last of them is the root, which is then the first of `nodes`.
        """
        below = nodes[1:] if pending else nodes
        if not below:
            return self._chain(pending, wanted=1)
        held, count = pending + len(self.scratch), len(below)
        rows = {node: held + row for row, node in enumerate(below)}
        paths = [
            [rows[above] if above in rows else above.row - self.cached for above in node.ancestors(self.tree.root)]
            for node in below
        ]
        seen = path_mask(paths, held + count)
        seen[:, :pending] = True
        chain = np.tri(pending, held + count, dtype=np.bool_)
        tokens = self.tokens[self.cached :] + [node.token for node in below]
        positions = [*range(self.cached, len(self.tokens)), *(node.position for node in below)]
        return Segment(
            self.slot,
            self.cached,
            self._read(tokens),
            np.array(positions),
            np.concatenate([chain, seen]),
            len(nodes),
            self.adapter,
        )

    def _read(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Return the tokens with ids that the model has."""
        return np.minimum(np.array(tokens, dtype=np.int64), self._last_id)


def _row_of(node: Node) -> int:
    return node.row
