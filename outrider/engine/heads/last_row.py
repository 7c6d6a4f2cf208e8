"""Drafts with heads that need only the features of the last committed row: Medusa and MLP speculators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.engine.growth import GrownLevel
from outrider.engine.heads.embeddings import TargetEmbeddings
from outrider.engine.heads.medusa import Medusa
from outrider.engine.heads.mlp import MlpSpeculator
from outrider.engine.heads.speculator import FloatRows, HeadNodes, HeadRoot, KeptFeatures
from outrider.engine.interface.logits import HostLogits, LogitsRow, logits_rows


class _LastRowDrafts:
    """Base of speculators that draft from the features of the last committed row alone."""

    grows_trees = False

    def __init__(self, embeddings: TargetEmbeddings) -> None:
        self._embeddings = embeddings
        self.unpadded_vocabulary = embeddings.unpadded_vocabulary
        self._latest: dict[int, Tensor] = {}  # by slot: [1, width]

    def open_slot(self, slot: int, source: int | None, rows: int) -> None:
        self._latest.pop(slot, None)

    def add_features(self, hidden: Tensor, kept: Sequence[KeptFeatures]) -> None:
        for slot, _, rows, _ in kept:
            self._latest[slot] = hidden[rows[-1:]]

    def _features(self, roots: Sequence[HeadRoot]) -> Tensor:
        """Return the features that each root is drafted from: [roots, width]."""
        return torch.cat([self._latest[root.slot] for root in roots])


class MedusaDrafts(_LastRowDrafts):
    """A `Speculator` with Medusa heads: all levels at once, because a head depends on a path's length alone."""

    all_levels_at_once = True

    def __init__(self, network: Medusa, embeddings: TargetEmbeddings) -> None:
        super().__init__(embeddings)
        self.depth = len(network.blocks)
        self._network = network
        self._logits = np.empty((0, 0, 0), np.float32)  # [roots, depth, vocabulary]
        self._rows: list[tuple[int, int]] = []  # the root and the level of each row

    def begin(self, roots: Sequence[HeadRoot], levels: int = 0) -> tuple[list[LogitsRow | None], list[GrownLevel]]:
        with torch.inference_mode():
            logits = self._network(self._features(roots), self._embeddings.unembed)
            self._logits = mask_padding(logits, self._embeddings)
        self._rows = [(root, 0) for root in range(len(roots))]
        return [*logits_rows(HostLogits(self._logits[:, 0]), 0, len(roots))], []

    def expand(self, nodes: Sequence[HeadNodes]) -> list[LogitsRow]:
        new = [(root, level + 1) for root, level in (self._rows[node.parent] for node in nodes)]
        self._rows += new
        logits = self._logits[[root for root, _ in new], [level for _, level in new]]
        return logits_rows(HostLogits(logits), 0, len(nodes))


class MlpDrafts(_LastRowDrafts):
    """A `Speculator` with an MLP speculator: a node's state comes from its parent's state and its own token."""

    all_levels_at_once = False

    def __init__(self, network: MlpSpeculator, embeddings: TargetEmbeddings) -> None:
        super().__init__(embeddings)
        self.depth = len(network.states)
        self._network = network
        self._rows: list[tuple[int, Tensor]] = []  # the level of each row, and its state [inner]

    def begin(self, roots: Sequence[HeadRoot], levels: int = 0) -> tuple[list[LogitsRow | None], list[GrownLevel]]:
        self._rows = []
        with torch.inference_mode():
            logits = self._step(0, self._features(roots), [root.tokens[-1] for root in roots])
        return [*logits_rows(HostLogits(logits), 0, len(roots))], []

    def expand(self, nodes: Sequence[HeadNodes]) -> list[LogitsRow]:
        levels = [self._rows[node.parent][0] + 1 for node in nodes]
        first = len(self._rows)
        found: dict[int, tuple[FloatRows, tuple[int, Tensor]]] = {}
        with torch.inference_mode():
            for level in sorted(set(levels)):  # each level has its own weights
                of_level = [index for index, other in enumerate(levels) if other == level]
                states = torch.stack([self._rows[nodes[index].parent][1] for index in of_level])
                logits = self._step(level, states, [nodes[index].token for index in of_level])
                found |= dict(zip(of_level, zip(logits, self._rows[-len(of_level) :], strict=True), strict=True))
        self._rows[first:] = [found[index][1] for index in range(len(nodes))]
        logits = np.stack([found[index][0] for index in range(len(nodes))])
        return logits_rows(HostLogits(logits), 0, len(nodes))

    def _step(self, level: int, states: Tensor, tokens: Sequence[int]) -> FloatRows:
        states = self._network(level, states, self._embeddings.embed(torch.tensor([*tokens])))
        self._rows += [(level, state) for state in states]
        return mask_padding(self._network.logits(states, self._embeddings.unembed), self._embeddings)


def mask_padding(logits: Tensor, embeddings: TargetEmbeddings) -> FloatRows:
    """Return logits for all ids of the target, with -inf for padding.

    Heads with an unembedding of their own may have another number of ids: the logits of missing ids are -inf, too.
    """
    logits = logits.float()
    if missing := embeddings.vocabulary - logits.shape[-1]:
        logits = pad(logits, (0, missing), value=-torch.inf)  # a negative number cuts
    if embeddings.unpadded_vocabulary < logits.shape[-1]:
        logits[..., embeddings.unpadded_vocabulary :] = -torch.inf
    masked: FloatRows = logits.numpy()
    return masked
