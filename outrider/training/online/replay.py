"""The replay buffer of an online training: the newest training samples, a random choice of all, and held-back ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from outrider.core.session.training_samples import TrainingSample

NEWEST = 48  # newest samples, which make up half of each batch
SAMPLED = 192  # samples chosen uniformly from all that ever arrived (reservoir sampling)
HELD_BACK = 64  # newest samples that are never trained on
EVERY = 4  # one sample in EVERY is held back
PASSES = 4.0  # average number of times that a token is trained on


class ReplayBuffer:
    """A bounded buffer. Held-back samples come from the same traffic as the others, and are as new."""

    def __init__(self, chance: np.random.Generator) -> None:
        self.held_back: deque[TrainingSample] = deque(maxlen=HELD_BACK)
        self.token_budget = 0.0  # tokens that may still be trained on before new samples arrive
        self._chance = chance
        self._newest: deque[TrainingSample] = deque(maxlen=NEWEST)
        self._sampled: list[TrainingSample] = []
        self._come = 0

    def add(self, samples: Iterable[TrainingSample], *, known: bool = False) -> None:
        """Add samples, oldest first. `known`: an earlier run of the training has learned from them already."""
        for sample in samples:
            self._come += 1
            if self._come % EVERY == 0:
                self.held_back.append(sample)
                continue
            self._newest.append(sample)
            if len(self._sampled) < SAMPLED:
                self._sampled.append(sample)
            elif (place := int(self._chance.integers(self._come))) < SAMPLED:
                self._sampled[place] = sample
            self.token_budget += 0.0 if known else PASSES * sample.chosen

    def batch(self, count: int) -> Sequence[TrainingSample]:
        """Return `count` samples to train on, half of them new ones; an empty list if the token budget is spent."""
        if self.token_budget <= 0.0 or not self._newest:
            return []
        new = self._chance.integers(len(self._newest), size=count - count // 2)
        old = self._chance.integers(len(self._sampled), size=count // 2)
        batch = [*(self._newest[at] for at in new), *(self._sampled[at] for at in old)]
        self.token_budget -= sum(sample.chosen for sample in batch)
        return batch
