"""Heads that draft from the last committed row's features alone: Medusa's and MLP speculators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.engine.heads.ends import Ends
from outrider.engine.heads.medusa import Medusa
from outrider.engine.heads.mlp import MlpSpeculator
from outrider.engine.heads.speculator import Drafted, FloatRows, Root


class _FromLatest:
    """What speculators share that draft from the last committed row's features alone."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self.sayable = ends.sayable
        self._latest: dict[int, Tensor] = {}  # by slot: [1, width]

    def take(self, slot: int, source: int | None, rows: int) -> None:
        self._latest.pop(slot, None)

    def keep(self, slot: int, start: int, features: Tensor) -> None:
        self._latest[slot] = features[-1:].clone()

    def _features(self, roots: Sequence[Root]) -> Tensor:
        """[roots, width]"""
        return torch.cat([self._latest[root.slot] for root in roots])


class MedusaDrafts(_FromLatest):
    """All levels at once: what a head says does not depend on the path, only on how long it is."""

    at_once = True

    def __init__(self, network: Medusa, ends: Ends) -> None:
        super().__init__(ends)
        self.depth = len(network.blocks)
        self._network = network
        self._said = np.empty((0, 0, 0), np.float32)  # [roots, depth, vocabulary]
        self._rows: list[tuple[int, int]] = []  # the root and the level of each row

    def begin(self, roots: Sequence[Root]) -> list[FloatRows | None]:
        with torch.inference_mode():
            self._said = sayable(self._network(self._features(roots), self._ends.unembed), self._ends)
        self._rows = [(root, 0) for root in range(len(roots))]
        return [*self._said[:, 0]]

    def expand(self, nodes: Sequence[Drafted]) -> FloatRows:
        new = [(root, level + 1) for root, level in (self._rows[node.parent] for node in nodes)]
        self._rows += new
        said: FloatRows = self._said[[root for root, _ in new], [level for _, level in new]]
        return said


class MlpDrafts(_FromLatest):
    """A node's state is its parent's and its token."""

    at_once = False

    def __init__(self, network: MlpSpeculator, ends: Ends) -> None:
        super().__init__(ends)
        self.depth = len(network.states)
        self._network = network
        self._rows: list[tuple[int, Tensor]] = []  # the level of each row, and its state [inner]

    def begin(self, roots: Sequence[Root]) -> list[FloatRows | None]:
        self._rows = []
        with torch.inference_mode():
            return [*self._step(0, self._features(roots), [root.tokens[-1] for root in roots])]

    def expand(self, nodes: Sequence[Drafted]) -> FloatRows:
        levels = [self._rows[node.parent][0] + 1 for node in nodes]
        first = len(self._rows)
        found: dict[int, tuple[FloatRows, tuple[int, Tensor]]] = {}
        with torch.inference_mode():
            for level in sorted(set(levels)):  # each has its own weights
                of_level = [index for index, other in enumerate(levels) if other == level]
                states = torch.stack([self._rows[nodes[index].parent][1] for index in of_level])
                said = self._step(level, states, [nodes[index].token for index in of_level])
                found |= dict(zip(of_level, zip(said, self._rows[-len(of_level) :], strict=True), strict=True))
        self._rows[first:] = [found[index][1] for index in range(len(nodes))]
        return np.stack([found[index][0] for index in range(len(nodes))])

    def _step(self, level: int, states: Tensor, tokens: Sequence[int]) -> FloatRows:
        states = self._network(level, states, self._ends.embed(torch.tensor([*tokens])))
        self._rows += [(level, state) for state in states]
        return sayable(self._network.logits(states, self._ends.unembed), self._ends)


def sayable(logits: Tensor, ends: Ends) -> FloatRows:
    """Logits as they are given, one for each id of the target: what is padding cannot be said, nor what heads lack that
    have an unembedding of their own, with another padding."""
    logits = logits.float()
    if missing := ends.vocabulary - logits.shape[-1]:
        logits = pad(logits, (0, missing), value=-torch.inf)  # fewer than none: cuts
    if ends.sayable < logits.shape[-1]:
        logits[..., ends.sayable :] = -torch.inf
    said: FloatRows = logits.numpy()
    return said
