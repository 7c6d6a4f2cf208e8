"""What a pass on a device says: what was chosen is read at once, logits when somebody asks for a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.sampler import Choice


class Ranking(NamedTuple):
    """The candidates for what follows a row, best first."""

    tokens: NDArray[np.int64]  # [count]
    scores: NDArray[np.float64]  # [count] log of the chance that it is the target's token, were there no others


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
        part, at, known = self._places[index]
        answers = self._fetched[part] if known else None
        if answers is None:
            return None
        token, _, first, second = answers[at].tolist()
        return Choice(int(token), first - second)

    def all(self) -> NDArray[np.float32]:
        """Every row: [rows, vocabulary]. One part is one copy."""
        if not self._logits:
            return np.empty((0, self.vocabulary), np.float32)
        parts = [logits.cpu().numpy() for logits in self._logits]
        if len(parts) == 1:
            order = [at for _, at, _ in self._places]
            return parts[0][: len(order)] if order == list(range(len(order))) else parts[0][order]
        return np.stack([parts[part][at] for part, at, _ in self._places])

    def rankings(self, count: int) -> list[Ranking]:
        """Of every row."""
        self.fetch()
        rankings = []
        for part, at, _ in self._places:
            answers = self._fetched[part]
            assert answers is not None
            rankings.append(Ranking(answers[at, :count].astype(np.int64), answers[at, count:]))
        return rankings
