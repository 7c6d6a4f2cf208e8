"""The logits of a pass on a device: the host reads chosen tokens at once, and a row of logits when it is used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.sampling.sampler import Choice
from outrider.engine.logits import BestTokens


class DeviceLogits:
    """The logits of a pass in the order of its segments; see `Logits`. The parts of a pass are added one by one."""

    def __init__(self, vocabulary: int, outputs: Sequence[int]) -> None:
        self.vocabulary = vocabulary
        self._outputs = outputs
        self._first = [sum(outputs[:index]) for index in range(len(outputs))]
        # Of each row: its part, its index there, and whether tokens were chosen for it.
        self._places: list[tuple[int, int, bool]] = [(0, 0, False)] * sum(outputs)
        self._logits: list[Tensor] = []
        self._choices: list[Tensor | None] = []
        self._fetched: list[NDArray[np.float64] | None] = []

    def add(self, part: Sequence[int], drawn: Sequence[bool], logits: Tensor, choices: Tensor | None) -> None:
        """Add the part with these segments. `drawn`: of each segment, whether its tokens were chosen.

        `logits`: [outputs, vocabulary]; `choices`: [outputs, 2 * candidates] float64, tokens and then their scores.
        """
        row = 0
        for index, chosen in zip(part, drawn, strict=True):
            for at in range(self._outputs[index]):
                self._places[self._first[index] + at] = len(self._logits), row, chosen and choices is not None
                row += 1
        self._logits.append(logits)
        self._choices.append(choices)

    def fetch(self) -> None:
        """Read the chosen tokens. Here the host waits for the device, once a pass."""
        self._fetched = [None if it is None else it.cpu().numpy() for it in self._choices]

    def row(self, index: int) -> NDArray[np.float32]:
        part, at, _ = self._places[index]
        row: NDArray[np.float32] = self._logits[part][at].cpu().numpy()
        return row

    def choice(self, index: int) -> Choice | None:
        best = self.best(index)
        return None if best is None else Choice(int(best.tokens[0]), float(best.scores[0] - best.scores[1]))

    def best(self, index: int) -> BestTokens | None:
        part, at, chosen = self._places[index]
        choices = self._fetched[part] if chosen else None
        if choices is None:
            return None
        tokens, scores = np.split(choices[at], 2)
        return BestTokens(tokens.astype(np.int64), scores)

    def all(self) -> NDArray[np.float32]:
        """Return all rows: [rows, vocabulary], with one copy where there is one part."""
        if not self._logits:
            return np.empty((0, self.vocabulary), np.float32)
        parts = [logits.cpu().numpy() for logits in self._logits]
        if len(parts) == 1:
            order = [at for _, at, _ in self._places]
            return parts[0][: len(order)] if order == list(range(len(order))) else parts[0][order]
        return np.stack([parts[part][at] for part, at, _ in self._places])
