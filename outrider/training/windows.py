"""Windows of a text, in an order that is a function of a seed: who knows how many were seen can go on from there."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.training.corpus import Ids


class Windows:
    """Every pass over the text sees all its windows once, with other borders and in another order than the last one."""

    def __init__(self, ids: Ids, length: int, seed: int) -> None:
        """`length`: tokens that are learned from; a window has one more in front of them. The text has at least one."""
        self._ids = ids
        self._length = length
        self._seed = seed
        whole = (len(ids) - 1) // length
        self.each_pass = max(1, whole - 1)  # leaves room to shift the borders
        self._slack = len(ids) - 1 - self.each_pass * length
        self._epoch = -1
        self._starts: NDArray[np.int64] = np.empty(0, np.int64)

    def batch(self, first: int, count: int) -> Tensor:
        """The windows first .. first + count of all that there will ever be: [count, length + 1] int64."""
        return torch.from_numpy(np.stack([self._window(number) for number in range(first, first + count)]))

    def _window(self, number: int) -> NDArray[np.int64]:
        epoch, place = divmod(number, self.each_pass)
        if epoch != self._epoch:
            random = np.random.default_rng([self._seed, epoch])
            shift = random.integers(0, min(self._slack, self._length) + 1)
            self._epoch, self._starts = epoch, shift + random.permutation(self.each_pass) * self._length
        start = self._starts[place]
        return self._ids[start : start + self._length + 1].astype(np.int64)


def spread(ids: Ids, length: int, count: int) -> list[Tensor]:
    """At most so many windows of a length, evenly over a text: [length] int64 each."""
    count = min(count, len(ids) // length)
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return [torch.from_numpy(ids[start : start + length].astype(np.int64)) for start in starts]
