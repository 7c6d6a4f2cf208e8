"""A draft model that learns from examples of what its target said: `transformers` and AdamW, in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from outrider.core.examples import Example
from outrider.engine.quiet import quiet
from outrider.errors import ConfigError
from outrider.training.lessons import save_checkpoint
from outrider.training.objectives import ObjectiveName, agreement, objective
from outrider.training.sparse import bucketed, filled

READ = 64  # tokens before the first that the target said, that are read with them
SCORED = 8  # examples in one pass that judges
CLIP = 1.0  # norm of a step's gradient
WARMUP = 10  # steps until the rate of learning is reached
SURE = 0.5  # of the loss, where the target was greedy: how likely the drafter thinks its token
RATE = 3e-4  # of learning
MEMORY = 0.95  # of the averaged weights, for what they were a step ago


@dataclass(frozen=True, slots=True)
class Score:
    """How often a drafter agrees with the target on some examples, each with as many places as it has."""

    agreed: NDArray[np.float64]  # [examples] how often the likeliest token is the same where the target was greedy, and
    # elsewhere the chance that draws under shared noise are, at temperature 1
    places: NDArray[np.int64]  # [examples]

    @property
    def mean(self) -> float:
        """Over all places."""
        return float((self.agreed * self.places).sum() / max(1, self.places.sum()))

    def lead(self, other: Score) -> tuple[float, float]:
        """By how much it is ahead of another one on the same examples, and the standard error of that."""
        weights = self.places / max(1, self.places.sum())
        ahead = self.agreed - other.agreed
        mean = float((weights * ahead).sum())
        spread = float((weights**2 * (ahead - mean) ** 2).sum())
        return mean, math.sqrt(spread * len(ahead) / max(1, len(ahead) - 1))


class Follower:
    """One model and its optimizer. Use it from one thread at a time.

    What is judged and saved are its weights averaged over the last steps (Polyak and Juditsky 1992), exponentially: a
    few dozen steps are all that there is time for, and the average needs fewer than a falling rate of learning.
    """

    def __init__(self, folder: Path, *, objective_name: ObjectiveName = "agreement", rate: float = RATE) -> None:
        """Raises CheckpointError, and ConfigError where there is no `transformers`."""
        self.folder = folder
        self._loss = objective(objective_name)
        self._rate = rate
        self._model = _loaded(folder)
        self._learning: Any = None  # what steps are taken with; `_model` is its average
        self._steps = 0
        self._agreed = WeakKeyDictionary[Example, float]()  # what is known of how it stands now

    @property
    def vocabulary(self) -> int:
        """Ids that it knows."""
        return int(self._model.config.vocab_size)

    def fits(self, example: Example) -> bool:
        """Whether it knows all ids of an example, and can read it."""
        longest = int(getattr(self._model.config, "max_position_embeddings", 0) or 1 << 30)
        return int(max(example.tokens.max(), example.ids.max())) < self.vocabulary and len(_window(example)) <= longest

    def learn(self, examples: Sequence[Example], other: Follower) -> float:
        """One step; gives the loss in nats. `other` is believed about what the examples do not tell of the target."""
        if self._learning is None:
            self._learning = deepcopy(self._model).train()
            self._optimizer = torch.optim.AdamW(self._learning.parameters(), weight_decay=0.0, betas=(0.9, 0.99))
        self._steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * min(1.0, self._steps / WARMUP)
        self._optimizer.zero_grad(set_to_none=True)
        places = _Places.of(examples)
        with torch.no_grad():
            ids, logprobs = filled(places.ids, places.logprobs, other.read(places))
        logits = _logits(self._learning, places)
        loss = self._loss(*bucketed(ids, logprobs, logits))
        surprise = cross_entropy(logits, places.ids[:, 0], reduction="none")
        loss = torch.where(places.greedy, SURE * surprise + (1.0 - SURE) * loss, loss).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._learning.parameters(), CLIP)
        self._optimizer.step()
        self._average()
        self._agreed.clear()
        return float(loss.detach())

    def score(self, examples: Sequence[Example]) -> Score:
        """How often it agrees with the target on these."""
        unknown = [example for example in examples if example not in self._agreed]
        for start in range(0, len(unknown), SCORED):
            part = unknown[start : start + SCORED]
            places = _Places.of(part)
            with torch.no_grad():
                logits = self.read(places)
                shared = agreement(*bucketed(places.ids, places.logprobs, logits)).neg().exp().double()
            same = (logits.argmax(-1) == places.ids[:, 0]).double()
            each = torch.split(torch.where(places.greedy, same, shared), places.counts)
            self._agreed.update(zip(part, (float(own.mean()) for own in each), strict=True))
        agreed = np.array([self._agreed[example] for example in examples])
        return Score(agreed, np.array([example.said for example in examples], np.int64))

    def read(self, places: _Places) -> Tensor:
        """What it thinks at each of them: logits [places, vocabulary]."""
        return _logits(self._model, places)

    def _average(self) -> None:
        memory = min(MEMORY, self._steps / (self._steps + 10))
        with torch.no_grad():
            for mean, latest in zip(self._model.parameters(), self._learning.parameters(), strict=True):
                mean.lerp_(latest, 1.0 - memory)

    def save(self, folder: Path) -> None:
        """The checkpoint as drafters load it: bfloat16, with what lay beside the one that it began as."""
        save_checkpoint(folder, self._model, self.folder)


class _Places(NamedTuple):
    """Where the target spoke, in the windows of some examples, and what it thought there."""

    tokens: Tensor  # [windows, tokens] what is behind a window, no place sees
    rows: Tensor  # [places] its window
    columns: Tensor  # [places] the token before it
    ids: Tensor  # [places, k]
    logprobs: Tensor  # [places, k]
    greedy: Tensor  # [places]
    counts: list[int]  # of each example

    @classmethod
    def of(cls, examples: Sequence[Example]) -> _Places:
        windows = [_window(example) for example in examples]
        tokens = torch.zeros(len(windows), max(map(len, windows)) - 1, dtype=torch.int64)
        for row, window in zip(tokens, windows, strict=True):
            row[: len(window) - 1] = torch.from_numpy(window[:-1])
        counts = [example.said for example in examples]
        ends = [len(window) - 1 for window in windows]
        k = min(example.ids.shape[1] for example in examples)
        return cls(
            tokens,
            torch.arange(len(windows)).repeat_interleave(torch.tensor(counts)),
            torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]),
            torch.from_numpy(np.concatenate([example.ids[:, :k] for example in examples])),
            torch.from_numpy(np.concatenate([example.logprobs[:, :k] for example in examples])),
            torch.tensor([example.greedy for example in examples]).repeat_interleave(torch.tensor(counts)),
            counts,
        )


def _logits(model: Any, places: _Places) -> Tensor:
    said: Tensor = model(places.tokens, use_cache=False).logits[places.rows, places.columns]
    return said


def _window(example: Example) -> NDArray[np.int64]:
    return example.tokens[max(0, example.first - READ) :]


def _loaded(folder: Path) -> Any:
    try:
        with quiet():
            from outrider.training.students import load
    except ImportError as error:
        raise ConfigError(f"training takes transformers ({error}); pip install 'outrider[transformers]'") from None
    return load(folder, "float32").model.eval()
