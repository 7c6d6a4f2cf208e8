"""What an online training has at hand of the examples that came: the newest, a sample of all, and some held back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from outrider.core.examples import Example

NEWEST = 48  # examples that are trained on most
SAMPLED = 192  # of all that ever came, each with the same chance
HELD_BACK = 64  # the newest of those that are never trained on
EVERY = 4  # one example in so many is held back
PASSES = 4.0  # times that a token is trained on, on average


class Replay:
    """Bounded. What is held back comes from the same traffic as what is trained on, and is as new."""

    def __init__(self, chance: np.random.Generator) -> None:
        self.held_back: deque[Example] = deque(maxlen=HELD_BACK)
        self.owed = 0.0  # tokens that may still be trained on before more examples come
        self._chance = chance
        self._newest: deque[Example] = deque(maxlen=NEWEST)
        self._sampled: list[Example] = []
        self._come = 0

    def add(self, examples: Iterable[Example], *, known: bool = False) -> None:
        """Takes examples, oldest first. `known`: a training that ended has learned from them already."""
        for example in examples:
            self._come += 1
            if self._come % EVERY == 0:
                self.held_back.append(example)
                continue
            self._newest.append(example)
            if len(self._sampled) < SAMPLED:
                self._sampled.append(example)
            elif (place := int(self._chance.integers(self._come))) < SAMPLED:
                self._sampled[place] = example
            self.owed += 0.0 if known else PASSES * example.said

    def batch(self, count: int) -> Sequence[Example]:
        """Half of them new ones, to be trained on now; none when what is there was trained on enough."""
        if self.owed <= 0.0 or not self._newest:
            return []
        new = self._chance.integers(len(self._newest), size=count - count // 2)
        old = self._chance.integers(len(self._sampled), size=count // 2)
        batch = [*(self._newest[at] for at in new), *(self._sampled[at] for at in old)]
        self.owed -= sum(example.said for example in batch)
        return batch
