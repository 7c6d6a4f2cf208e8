"""A draft model that learns from examples of what its target said: `transformers` and AdamW, in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.examples import Example
from outrider.engine.loading import quiet
from outrider.errors import ConfigError
from outrider.training.lessons import save_checkpoint
from outrider.training.objectives import ObjectiveName, agreement, objective
from outrider.training.sparse import bucketed

READ = 64  # tokens before the first that the target said, that are read with them
SCORED = 8  # examples in one pass that judges
CLIP = 1.0  # norm of a step's gradient
WARMUP = 10  # steps until the rate of learning is reached


@dataclass(frozen=True, slots=True)
class Score:
    """How often a drafter agrees with the target on some examples, each with as many places as it has."""

    shared: NDArray[np.float64]  # [examples] chance that draws under shared noise agree, at temperature 1
    greedy: NDArray[np.float64]  # [examples] share of places where the likeliest token is the same
    places: NDArray[np.int64]  # [examples]

    @property
    def mean(self) -> float:
        """Over all places, both measures."""
        return float(((self.shared + self.greedy) / 2 * self.places).sum() / max(1, self.places.sum()))

    def lead(self, other: Score) -> tuple[float, float]:
        """By how much it is ahead of another one on the same examples, and the standard error of that."""
        weights = self.places / max(1, self.places.sum())
        ahead = (self.shared + self.greedy - other.shared - other.greedy) / 2
        mean = float((weights * ahead).sum())
        spread = float((weights**2 * (ahead - mean) ** 2).sum())
        return mean, math.sqrt(spread * len(ahead) / max(1, len(ahead) - 1))


class Follower:
    """One model and its optimizer. Use it from one thread at a time."""

    def __init__(self, folder: Path, *, objective_name: ObjectiveName = "agreement", rate: float = 1e-4) -> None:
        """Raises CheckpointError, and ConfigError where there is no `transformers`."""
        self.folder = folder
        self._loss = objective(objective_name)
        self._rate = rate
        self._model = _loaded(folder)
        self._steps = 0
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=rate, weight_decay=0.0, betas=(0.9, 0.99))

    @property
    def vocabulary(self) -> int:
        """Ids that it knows."""
        return int(self._model.config.vocab_size)

    def fits(self, example: Example) -> bool:
        """Whether it knows all ids of an example, and can read it."""
        longest = int(getattr(self._model.config, "max_position_embeddings", 0) or 1 << 30)
        return int(max(example.tokens.max(), example.ids.max())) < self.vocabulary and len(_window(example)) <= longest

    def learn(self, examples: Sequence[Example]) -> float:
        """One step; gives the loss in nats."""
        self._model.train()
        self._steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * min(1.0, self._steps / WARMUP)
        self._optimizer.zero_grad(set_to_none=True)
        ids, logprobs, logits, _ = self._run(examples)
        loss = self._loss(*bucketed(ids, logprobs, logits)).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        return float(loss.detach())

    def score(self, examples: Sequence[Example]) -> Score:
        """How often it agrees with the target on these."""
        self._model.eval()
        shared, greedy, places = list[float](), list[float](), list[int]()
        for start in range(0, len(examples), SCORED):
            with torch.no_grad():
                ids, logprobs, logits, counts = self._run(examples[start : start + SCORED])
                agree = torch.split(agreement(*bucketed(ids, logprobs, logits)).neg().exp(), counts)
                same = torch.split((logits.argmax(-1) == ids[:, 0]).double(), counts)
            shared += [float(part.mean()) for part in agree]
            greedy += [float(part.mean()) for part in same]
            places += counts
        return Score(np.array(shared), np.array(greedy), np.array(places, np.int64))

    def save(self, folder: Path) -> None:
        """The checkpoint as drafters load it: bfloat16, with what lay beside the one that it began as."""
        save_checkpoint(folder, self._model, self.folder)

    def _run(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """What target and drafter think at every place: ids and log-probabilities [places, k], logits [places,
        vocabulary]; and how many places each example has."""
        windows = [_window(example) for example in examples]
        tokens = torch.zeros(len(windows), max(map(len, windows)) - 1, dtype=torch.int64)
        rows, columns = list[Tensor](), list[Tensor]()
        for row, (window, example) in enumerate(zip(windows, examples, strict=True)):
            tokens[row, : len(window) - 1] = torch.from_numpy(window[:-1])  # what is behind it, no place sees
            columns.append(torch.arange(len(window) - example.said - 1, len(window) - 1))
            rows.append(torch.full_like(columns[-1], row))
        k = min(example.ids.shape[1] for example in examples)
        ids = torch.from_numpy(np.concatenate([example.ids[:, :k] for example in examples]))
        logprobs = torch.from_numpy(np.concatenate([example.logprobs[:, :k] for example in examples]))
        logits = self._model(tokens, use_cache=False).logits[torch.cat(rows), torch.cat(columns)]
        return ids, logprobs, logits, [example.said for example in examples]


def _window(example: Example) -> NDArray[np.int64]:
    return example.tokens[max(0, example.first - READ) :]


def _loaded(folder: Path) -> Any:
    try:
        with quiet():
            from outrider.training.students import load
    except ImportError as error:
        raise ConfigError(f"training takes transformers ({error}); pip install 'outrider[transformers]'") from None
    return load(folder, "float32").model
