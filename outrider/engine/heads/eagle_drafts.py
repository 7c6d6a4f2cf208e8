"""Drafting with EAGLE: its layer's KV of each slot, read on from true features; a round's nodes lie behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.batch import Segment
from outrider.engine.cache import lazy_zeros
from outrider.engine.heads.eagle import Eagle, Eagle3
from outrider.engine.heads.eagle_layer import EagleLayer
from outrider.engine.heads.ends import Ends
from outrider.engine.heads.shape import Shape
from outrider.engine.heads.speculator import Drafted, FloatRows, Root

CHUNK = 512  # rows of a text that a round reads; a session that has more to read is not drafted for meanwhile
ROOM = 128  # rows of a slot behind its text: nodes that a round may expand


@dataclass(slots=True)
class _Place:
    """What a round knows of one slot."""

    slot: int
    read: int  # rows of its text
    drafted: int = 0  # rows behind them


@dataclass(frozen=True, slots=True)
class _Row:
    """One row that a round has given."""

    place: _Place
    state: Tensor  # [width]
    above: tuple[int, ...]  # drafted rows that it sees, itself the last; none: a root


class EagleDrafts:
    """Row i of a slot stands for token i + 1 and the features of token i.

    All features are kept, [slots, rows, width * parts], so that a text is read when it is drafted for, and one whose
    heads rest costs no more than writing them down. A commit keeps nothing that was drafted: its rows are read again,
    from true features.
    """

    at_once = False

    def __init__(self, network: Eagle | Eagle3, shape: Shape, ends: Ends, *, slots: int, context: int) -> None:
        self.depth = shape.depth
        self.sayable = ends.sayable
        self._network = network
        rows = context + ROOM
        self._features = lazy_zeros(slots, rows, shape.width * shape.features.parts)
        self._layer = EagleLayer(network, shape, ends, slots=slots, rows=rows)
        self._read = [0] * slots  # rows whose KV is that of the slot's text
        self._rows: list[_Row | None] = []

    def take(self, slot: int, source: int | None, rows: int) -> None:
        known = min(self._read[slot if source is None else source], max(0, rows - 1))  # a row's token is the next one
        if source is not None:
            with torch.inference_mode():
                self._features[slot, :rows] = self._features[source, :rows]
                self._layer.copy(source, slot, known)
        self._read[slot] = known

    def keep(self, slot: int, start: int, features: Tensor) -> None:
        with torch.inference_mode():
            self._features[slot, start : start + len(features)] = features
        self._read[slot] = min(self._read[slot], start)

    def begin(self, roots: Sequence[Root]) -> list[FloatRows | None]:
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
            given = self._layer.run(segments, self._network.enter(torch.cat(states)))
            logits = iter(self._layer.said(given)) if any(ready) else None
        found = iter(given)
        self._rows = [
            _Row(_Place(root.slot, len(root.tokens) - 1), next(found), ()) if wanted else None
            for root, wanted in zip(roots, ready, strict=True)
        ]
        return [next(logits) if wanted and logits is not None else None for wanted in ready]

    def expand(self, nodes: Sequence[Drafted]) -> FloatRows:
        parents = [row for node in nodes if (row := self._rows[node.parent]) is not None]
        by_place: dict[int, list[int]] = {}
        for index, parent in enumerate(parents):
            by_place.setdefault(parent.place.slot, []).append(index)
        segments = [self._segment([(parents[index], nodes[index].token) for index in own]) for own in by_place.values()]
        order = [index for own in by_place.values() for index in own]
        with torch.inference_mode():
            given = self._layer.run(segments, torch.stack([parents[index].state for index in order]))
            logits = self._layer.said(given)
        first = len(self._rows)
        self._rows += [None] * len(nodes)
        said = np.empty_like(logits)
        for at, index in enumerate(order):
            parent = parents[index]
            self._rows[first + index] = _Row(parent.place, given[at], (*parent.above, parent.place.drafted))
            parent.place.drafted += 1
            said[index] = logits[at]
        return said

    def _segment(self, nodes: Sequence[tuple[_Row, int]]) -> Segment:
        """Nodes of one slot, behind what the round has drafted there."""
        place = nodes[0][0].place
        mask = np.zeros((len(nodes), place.drafted + len(nodes)), np.bool_)
        for row, (parent, _) in enumerate(nodes):
            mask[row, [*parent.above, place.drafted + row]] = True
        positions = np.array([place.read + len(parent.above) for parent, _ in nodes])
        return Segment(place.slot, place.read, np.array([token for _, token in nodes]), positions, mask)
