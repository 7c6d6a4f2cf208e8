"""What a pass on a device says: what was chosen is read at once, logits when somebody asks for a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.sampler import Choice
from outrider.engine.logits import Best


class Said:
    """What the parts of a pass say, in the order of its segments. See `Logits`."""

    def __init__(self, vocabulary: int, outputs: Sequence[int]) -> None:
        self.vocabulary = vocabulary
        self._outputs = outputs
        self._first = [sum(outputs[:index]) for index in range(len(outputs))]
        # For each row its part, its place there, and whether it was chosen.
        self._places: list[tuple[int, int, bool]] = [(0, 0, False)] * sum(outputs)
        self._logits: list[Tensor] = []
        self._answers: list[Tensor | None] = []
        self._fetched: list[NDArray[np.float64] | None] = []

    def add(self, part: Sequence[int], asked: Sequence[bool], logits: Tensor, answers: Tensor | None) -> None:
        """The part of some segments."""
        row = 0
        for index, known in zip(part, asked, strict=True):
            for at in range(self._outputs[index]):
                self._places[self._first[index] + at] = len(self._logits), row, known and answers is not None
                row += 1
        self._logits.append(logits)
        self._answers.append(answers)

    def fetch(self) -> None:
        """Reads what was chosen: here the host waits for the device, once."""
        self._fetched = [None if it is None else it.cpu().numpy() for it in self._answers]

    def row(self, index: int) -> NDArray[np.float32]:
        part, at, _ = self._places[index]
        row: NDArray[np.float32] = self._logits[part][at].cpu().numpy()
        return row

    def choice(self, index: int) -> Choice | None:
        best = self.best(index)
        return None if best is None else Choice(int(best.tokens[0]), float(best.scores[0] - best.scores[1]))

    def best(self, index: int) -> Best | None:
        part, at, known = self._places[index]
        answers = self._fetched[part] if known else None
        if answers is None:
            return None
        tokens, scores = np.split(answers[at], 2)
        return Best(tokens.astype(np.int64), scores)

    def all(self) -> NDArray[np.float32]:
        """Every row: [rows, vocabulary]. One part is one copy."""
        if not self._logits:
            return np.empty((0, self.vocabulary), np.float32)
        parts = [logits.cpu().numpy() for logits in self._logits]
        if len(parts) == 1:
            order = [at for _, at, _ in self._places]
            return parts[0][: len(order)] if order == list(range(len(order))) else parts[0][order]
        return np.stack([parts[part][at] for part, at, _ in self._places])
