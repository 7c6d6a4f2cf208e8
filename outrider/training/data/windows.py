"""Windows of a text in an order that is a function of a seed, so that a training can continue at any window."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.training.data.corpus import Ids


class Windows:
    """The windows of a text. Each pass over the text has all windows once, with new borders and in a new order."""

    def __init__(self, ids: Ids, length: int, seed: int, rows: int = 1) -> None:
        """`length`: tokens to learn from; a window has one more token before them. The text has at least one window.
        `rows`: windows of a batch.
        """
        self._rows = rows
        self._ids = ids
        self._length = length
        self._seed = seed
        whole = (len(ids) - 1) // length
        self.each_pass = max(1, whole - 1)  # leaves room to shift the borders
        self._slack = len(ids) - 1 - self.each_pass * length
        self._epoch = -1
        self._starts: NDArray[np.int64] = np.empty(0, np.int64)

    def batch(self, number: int) -> Tensor:
        """Return a batch of the infinite sequence: [rows, length + 1] int64."""
        first = number * self._rows
        return torch.from_numpy(np.stack([self._window(number) for number in range(first, first + self._rows)]))

    def tokens(self, number: int) -> int:
        """Return the tokens of a batch to learn from."""
        return self._rows * self._length

    def _window(self, number: int) -> NDArray[np.int64]:
        epoch, place = divmod(number, self.each_pass)
        if epoch != self._epoch:
            random = np.random.default_rng([self._seed, epoch])
            shift = random.integers(0, min(self._slack, self._length) + 1)
            self._epoch, self._starts = epoch, shift + random.permutation(self.each_pass) * self._length
        start = self._starts[place]
        return self._ids[start : start + self._length + 1].astype(np.int64)


def spread(ids: Ids, length: int, count: int) -> list[Tensor]:
    """Return at most `count` windows, spread evenly over a text: [length] int64 each."""
    count = min(count, len(ids) // length)
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return [torch.from_numpy(ids[start : start + length].astype(np.int64)) for start in starts]
