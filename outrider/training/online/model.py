"""A draft model that learns from training samples of its target: `transformers` and AdamW, in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from outrider.core.session.training_samples import TrainingSample
from outrider.engine.transformers.quiet import quiet
from outrider.errors import ConfigError
from outrider.training.objectives import ObjectiveName, agreement, objective
from outrider.training.positions import Chosen, Positions
from outrider.training.sparse import bucketed, filled
from outrider.training.tasks.drafter_task import save_checkpoint

READ = 64  # tokens before the target's first token that are read, too
SCORED = 8  # samples in one pass of an evaluation
CLIP = 1.0  # norm of a step's gradient
WARMUP = 10  # steps until the full learning rate
GREEDY_WEIGHT = 0.5  # share in the loss of the cross-entropy of the target's token, if the target was greedy
RATE = 3e-4  # learning rate
DECAY = 0.95  # of the exponential average of the weights, per step


@dataclass(frozen=True, slots=True)
class AgreementScore:
    """How often a drafter agrees with the target on some samples, weighted by their positions."""

    # [samples] If the target was greedy: the share of positions with the same likeliest token. Else: the probability
    # that samples with shared noise agree, at temperature 1.
    agreed: NDArray[np.float64]
    positions: NDArray[np.int64]  # [samples] number of positions

    @property
    def mean(self) -> float:
        """The mean agreement over all positions."""
        return float((self.agreed * self.positions).sum() / max(1, self.positions.sum()))

    def lead(self, other: AgreementScore) -> tuple[float, float]:
        """Return the lead over another score on the same samples, and the standard error of the lead."""
        weights = self.positions / max(1, self.positions.sum())
        ahead = self.agreed - other.agreed
        mean = float((weights * ahead).sum())
        spread = float((weights**2 * (ahead - mean) ** 2).sum())
        return mean, math.sqrt(spread * len(ahead) / max(1, len(ahead) - 1))


class OnlineModel:
    """One model and its optimizer. Use it from one thread at a time.

    Scores and saves use the exponential average of the weights over the last steps (Polyak and Juditsky 1992): there is
    time for only a few dozen steps, and averaging needs fewer steps than a falling learning rate.
    """

    def __init__(self, folder: Path, *, objective_name: ObjectiveName = "agreement", rate: float = RATE) -> None:
        """Load the model of a folder. Raises CheckpointError, and ConfigError without `transformers`."""
        self.folder = folder
        self._loss = objective(objective_name)
        self._rate = rate
        self.model = _loaded(folder)
        self.learning: Any = None  # the model that the optimizer changes; `model` is its average
        self._steps = 0
        self._agreed = WeakKeyDictionary[TrainingSample, float]()  # agreement of the current weights, cached

    @property
    def vocabulary(self) -> int:
        """The number of token ids of the model."""
        return int(self.model.config.vocab_size)

    def fits(self, sample: TrainingSample) -> bool:
        """Return whether all ids of a sample are in the vocabulary and its window fits into the context."""
        longest = int(getattr(self.model.config, "max_position_embeddings", 0) or 1 << 30)
        return int(max(sample.tokens.max(), sample.ids.max())) < self.vocabulary and len(_window(sample)) <= longest

    def learn(self, samples: Sequence[TrainingSample], other: OnlineModel) -> float:
        """Take one step and return the loss in nats.

        `other`: estimates how the target shares its remaining probability among tokens that the samples do not list.
        """
        if self.learning is None:
            self.learning = deepcopy(self.model).train()
            self._optimizer = torch.optim.AdamW(self.learning.parameters(), weight_decay=0.0, betas=(0.9, 0.99))
        self._steps += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * min(1.0, self._steps / WARMUP)
        self._optimizer.zero_grad(set_to_none=True)
        positions = _positions(samples)
        with torch.no_grad():
            ids, logprobs = filled(positions.ids, positions.logprobs, other.read(positions))
        logits = positions.logits(self.learning)
        loss = self._loss(*bucketed(ids, logprobs, logits))
        surprise = cross_entropy(logits, positions.ids[:, 0], reduction="none")
        loss = torch.where(_greedy(samples), GREEDY_WEIGHT * surprise + (1.0 - GREEDY_WEIGHT) * loss, loss).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if torch.nn.utils.clip_grad_norm_(self.learning.parameters(), CLIP).isfinite():
            self._optimizer.step()
        self._average()
        self._agreed.clear()
        return float(loss.detach())

    def score(self, samples: Sequence[TrainingSample]) -> AgreementScore:
        """Return how often the model agrees with the target on some samples."""
        unknown = [sample for sample in samples if sample not in self._agreed]
        for start in range(0, len(unknown), SCORED):
            part = unknown[start : start + SCORED]
            positions = _positions(part)
            with torch.no_grad():
                logits = self.read(positions)
                shared = agreement(*bucketed(positions.ids, positions.logprobs, logits)).neg().exp().double()
            same = (logits.argmax(-1) == positions.ids[:, 0]).double()
            each = torch.split(torch.where(_greedy(part), same, shared), positions.counts)
            self._agreed.update(zip(part, (float(shares.mean()) for shares in each), strict=True))
        agreed = np.array([self._agreed[sample] for sample in samples])
        return AgreementScore(agreed, np.array([sample.chosen for sample in samples], np.int64))

    def read(self, positions: Positions) -> Tensor:
        """Return the logits at each position: [positions, vocabulary]."""
        return positions.logits(self.model)

    def _average(self) -> None:
        decay = min(DECAY, self._steps / (self._steps + 10))
        with torch.no_grad():
            for mean, latest in zip(self.model.parameters(), self.learning.parameters(), strict=True):
                mean.lerp_(latest, 1.0 - decay)

    def save(self, folder: Path) -> None:
        """Write a checkpoint that drafters can load: bfloat16, with the tokenizer files of the original checkpoint."""
        save_checkpoint(folder, self.model, self.folder)


def _positions(samples: Sequence[TrainingSample]) -> Positions:
    return Positions.of(map(_chosen, samples))


def _chosen(sample: TrainingSample) -> Chosen:
    window = _window(sample)
    return Chosen(window, np.arange(len(window) - sample.chosen, len(window)), sample.ids, sample.logprobs)


def _greedy(samples: Sequence[TrainingSample]) -> Tensor:
    """Return whether the target was greedy at each position: [positions]."""
    greedy, counts = [sample.greedy for sample in samples], [sample.chosen for sample in samples]
    return torch.tensor(greedy).repeat_interleave(torch.tensor(counts))


def _window(sample: TrainingSample) -> NDArray[np.int64]:
    return sample.tokens[max(0, sample.first - READ) :]


def _loaded(folder: Path) -> Any:
    try:
        with quiet():
            from outrider.training.tasks.student_init import load
    except ImportError as error:
        raise ConfigError(f"training takes transformers ({error}); pip install 'outrider[transformers]'") from None
    return load(folder, "float32").model.eval()
