"""Positions of texts at which a target chose tokens, with its distribution there: what a drafter learns from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Chosen(NamedTuple):
    """A text, and what a target chose in it."""

    tokens: NDArray[Any]  # [n]
    places: NDArray[np.int64]  # [m] ascending: indices of the tokens that the target chose, from 1 on
    ids: NDArray[Any]  # [m, k] its likeliest tokens there
    logprobs: NDArray[Any]  # [m, k] of these


class Positions(NamedTuple):
    """The positions of several texts, in one pass of a model."""

    tokens: Tensor  # [texts, longest - 1] with padding, which no position attends to
    rows: Tensor  # [positions] index of the text
    columns: Tensor  # [positions] index of the token before the position
    following: Tensor  # [positions] the token that the target chose
    ids: Tensor  # [positions, k] the target's likeliest tokens
    logprobs: Tensor  # [positions, k] of these, at temperature 1
    counts: list[int]  # positions of each text

    @classmethod
    def of(cls, texts: Iterable[Chosen]) -> Positions:
        """Return the positions of some texts."""
        texts = list(texts)
        tokens = torch.zeros(len(texts), max(len(it.tokens) for it in texts) - 1, dtype=torch.int64)
        for row, it in zip(tokens, texts, strict=True):
            row[: len(it.tokens) - 1] = torch.from_numpy(it.tokens[:-1].astype(np.int64))
        k = min(it.ids.shape[1] for it in texts)
        counts = [len(it.places) for it in texts]

        def joined(parts: Iterable[NDArray[Any]], kind: type[np.generic]) -> Tensor:
            return torch.from_numpy(np.concatenate(list(parts)).astype(kind))

        return cls(
            tokens,
            torch.arange(len(texts)).repeat_interleave(torch.tensor(counts)),
            joined((it.places - 1 for it in texts), np.int64),
            joined((it.tokens[it.places] for it in texts), np.int64),
            joined((it.ids[:, :k] for it in texts), np.int64),
            joined((it.logprobs[:, :k] for it in texts), np.float32),
            counts,
        )

    def to(self, device: torch.device) -> Positions:
        """Return them on a device."""
        moved = {name: it.to(device) for name, it in self._asdict().items() if name != "counts"}
        return self._replace(**moved)

    def logits(self, model: Any) -> Tensor:
        """Return a model's logits at each position: [positions, vocabulary]."""
        found: Tensor = model(self.tokens, use_cache=False).logits[self.rows, self.columns]
        return found
