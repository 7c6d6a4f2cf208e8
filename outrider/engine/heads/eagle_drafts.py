"""Drafts with EAGLE inside the verifier: a slot has the KV of its text, from true features, and of a round's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batch import Segment
from outrider.engine.eager.kv_cache import lazy_zeros
from outrider.engine.heads.config import HeadsConfig
from outrider.engine.heads.eagle import Eagle, Eagle3
from outrider.engine.heads.eagle_layer import EagleLayer
from outrider.engine.heads.embeddings import TargetEmbeddings
from outrider.engine.heads.speculator import FloatRows, HeadNodes, HeadRoot
from outrider.engine.masks import path_mask

CHUNK = 512  # rows of a text that a round reads; a session with more unread rows gets no drafts in that round
ROOM = 128  # rows of a slot behind its text, for the nodes that a round expands


@dataclass(slots=True)
class _DraftedSlot:
    """The state of one slot in a round."""

    slot: int
    read: int  # rows of its text
    drafted: int = 0  # rows of nodes behind them


@dataclass(frozen=True, slots=True)
class _Row:
    """One row that a round has computed."""

    drafted: _DraftedSlot
    state: Tensor  # [width]
    above: tuple[int, ...]  # drafted rows that it sees, itself the last; (): a root


class EagleDrafts:
    """A `Speculator` with EAGLE heads. Row i of a slot is that of token i + 1 and the features of token i.

    It stores all features, [slots, rows, width * parts], and reads a text only when it drafts for it, so that a session
    whose heads pause costs no more than storing features. A commit keeps no drafted row: its rows are read again, from
    true features. What it has read stays read when the target reads the text again.
    """

    all_levels_at_once = False

    def __init__(
        self, network: Eagle | Eagle3, shape: HeadsConfig, embeddings: TargetEmbeddings, *, slots: int, context: int
    ) -> None:
        self.depth = shape.depth
        self.unpadded_vocabulary = embeddings.unpadded_vocabulary
        self._network = network
        rows = context + ROOM
        self._features = lazy_zeros(slots, rows, shape.width * shape.features.parts)
        self._layer = EagleLayer(network, shape, embeddings, slots=slots, rows=rows)
        self._read = [0] * slots  # by slot: rows of its text whose KV is computed
        self._rows: list[_Row | None] = []

    def open_slot(self, slot: int, source: int | None, rows: int) -> None:
        known = min(self._read[slot if source is None else source], max(0, rows - 1))  # row i is that of token i + 1
        if source is not None:
            with torch.inference_mode():
                self._features[slot, :rows] = self._features[source, :rows]
                self._layer.copy(source, slot, known)
        self._read[slot] = known

    def add_features(self, slot: int, start: int, features: Tensor) -> None:
        with torch.inference_mode():
            self._features[slot, start : start + len(features)] = features

    def begin(self, roots: Sequence[HeadRoot]) -> list[FloatRows | None]:
        parts = [(self._read[root.slot], min(len(root.tokens) - 1, self._read[root.slot] + CHUNK)) for root in roots]
        ready = [stop == len(root.tokens) - 1 for root, (_, stop) in zip(roots, parts, strict=True)]
        segments, states = [], []
        for root, (start, stop), wanted in zip(roots, parts, ready, strict=True):
            start = min(start, stop - 1)  # at least the row of the root itself
            tokens = np.array(root.tokens[start + 1 : stop + 1])
            segments.append(Segment(root.slot, start, tokens, np.arange(start, stop), None, int(wanted)))
            states.append(self._features[root.slot, start:stop])
            self._read[root.slot] = stop
        with torch.inference_mode():
            computed = self._layer.run(segments, self._network.enter(torch.cat(states)))
            logits = iter(self._layer.logits(computed)) if any(ready) else None
        found = iter(computed)
        self._rows = [
            _Row(_DraftedSlot(root.slot, len(root.tokens) - 1), next(found), ()) if wanted else None
            for root, wanted in zip(roots, ready, strict=True)
        ]
        return [next(logits) if wanted and logits is not None else None for wanted in ready]

    def expand(self, nodes: Sequence[HeadNodes]) -> FloatRows:
        parents = [row for node in nodes if (row := self._rows[node.parent]) is not None]
        by_slot: dict[int, list[int]] = {}
        for index, parent in enumerate(parents):
            by_slot.setdefault(parent.drafted.slot, []).append(index)
        segments = [self._segment([(parents[index], nodes[index].token) for index in of]) for of in by_slot.values()]
        order = [index for of in by_slot.values() for index in of]
        with torch.inference_mode():
            computed = self._layer.run(segments, torch.stack([parents[index].state for index in order]))
            logits = self._layer.logits(computed)
        first = len(self._rows)
        self._rows += [None] * len(nodes)
        reordered = np.empty_like(logits)
        for at, index in enumerate(order):
            parent = parents[index]
            self._rows[first + index] = _Row(parent.drafted, computed[at], (*parent.above, parent.drafted.drafted))
            parent.drafted.drafted += 1
            reordered[index] = logits[at]
        return reordered

    def _segment(self, nodes: Sequence[tuple[_Row, int]]) -> Segment:
        """Return the segment of nodes of one slot, behind the rows that the round has drafted there."""
        slot = nodes[0][0].drafted
        paths = [(*parent.above, row) for row, (parent, _) in enumerate(nodes, slot.drafted)]
        mask = path_mask(paths, slot.drafted + len(nodes))
        positions = np.array([slot.read + len(parent.above) for parent, _ in nodes])
        return Segment(slot.slot, slot.read, np.array([token for _, token in nodes]), positions, mask)
