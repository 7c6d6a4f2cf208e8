"""Drafts with EAGLE inside the verifier: a slot has the KV of its text, from true features, and of a round's nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.engine.growth import GrownLevel
from outrider.engine.heads.config import HeadsConfig
from outrider.engine.heads.drafted_rows import DraftedRows
from outrider.engine.heads.eagle import Eagle, Eagle3
from outrider.engine.heads.eagle_layer import EagleLayer
from outrider.engine.heads.embeddings import TargetEmbeddings
from outrider.engine.heads.speculator import HeadNodes, HeadRoot, KeptFeatures
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.logits import HostLogits, LogitsRow, logits_rows
from outrider.engine.torch_layers.kv_cache import lazy_zeros

CHUNK = 512  # rows of a text that a round reads; a session with more unread rows gets no drafts in that round
ROOM = 128  # rows of a slot behind its text, for the nodes that a round expands


class EagleDrafts:
    """A `Speculator` with EAGLE heads. Row i of a slot is that of token i + 1 and the features of token i.

    It stores all features, [slots, rows, width * parts], and reads a text only when it drafts for it, so that a session
    whose heads pause costs no more than storing features. A commit keeps no drafted row: its rows are read again, from
    true features. What it has read stays read when the target reads the text again.
    """

    all_levels_at_once = grows_trees = False

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
        self._rows = DraftedRows()
        self._states: list[Tensor] = []  # of the round's rows, by number: [width]

    def open_slot(self, slot: int, source: int | None, rows: int) -> None:
        known = min(self._read[slot if source is None else source], max(0, rows - 1))  # row i is that of token i + 1
        if source is not None:
            with torch.inference_mode():
                self._features[slot, :rows] = self._features[source, :rows]
                self._layer.copy(source, slot, known)
        self._read[slot] = known

    def add_features(self, hidden: Tensor, kept: Sequence[KeptFeatures]) -> None:
        with torch.inference_mode():
            for slot, start, rows, _ in kept:
                self._features[slot, start : start + len(rows)] = hidden[rows]

    def begin(self, roots: Sequence[HeadRoot], levels: int = 0) -> tuple[list[LogitsRow | None], list[GrownLevel]]:
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
            found = iter(computed)
            rows = iter(logits_rows(HostLogits(self._layer.logits(computed)), 0, len(computed)) if any(ready) else ())
        nothing = states[0].new_zeros(0)
        self._states = [next(found) if wanted else nothing for wanted in ready]
        self._rows.begin(
            [(it.slot, len(it.tokens) - 1) if wanted else None for it, wanted in zip(roots, ready, strict=True)]
        )
        return [next(rows) if wanted else None for wanted in ready], []

    def expand(self, nodes: Sequence[HeadNodes]) -> list[LogitsRow]:
        segments, order = self._rows.expand(nodes)
        with torch.inference_mode():
            states = torch.stack([self._states[nodes[index].parent] for index in order])
            computed = self._layer.run(segments, states)
            by_node = computed[np.argsort(order)]
            self._states += by_node
            return logits_rows(HostLogits(self._layer.logits(by_node)), 0, len(nodes))
