"""The logits of a pass on a device: the host reads chosen tokens at once, and a row of logits when it is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.sampling.logprobs import ScoredTokens, packed
from outrider.core.sampling.sampler import Choice
from outrider.engine.gpu.sampling.restrictions import TOP, likeliest
from outrider.engine.interface.logits import BestTokens


class DeviceLogits:
    """The logits of a pass in the order of its segments; see `Logits`. The parts of a pass are added one by one."""

    def __init__(self, vocabulary: int, outputs: Sequence[int]) -> None:
        """`outputs`: of each segment."""
        self.vocabulary = vocabulary
        *self.first, self._rows = accumulate(outputs, initial=0)  # row of each segment, and all rows
        self._part: Sequence[int] = ()  # of each row
        self._at: Sequence[int] = ()  # its index there
        self._chosen: Sequence[bool] = ()  # whether tokens were chosen for it
        self._logits: list[Tensor] = []
        self._choices: list[Tensor | None] = []
        self._likeliest: list[Tensor | None] = []
        self._logprobs: list[Sequence[int | None]] = []
        self._likely: list[NDArray[np.float64] | None] = []  # `_likeliest` on the host
        self._best: list[BestTokens | None] = []  # of all rows of a part together
        self._firsts: list[tuple[list[int], list[float]]] = []  # first tokens and their gaps

    def add(
        self,
        rows: NDArray[np.int64],
        chosen: NDArray[np.bool_],
        logits: Tensor,
        choices: Tensor | None,
        likeliest: Tensor | None = None,
        logprobs: Sequence[int | None] = (),
    ) -> None:
        """Add a part. `rows`: what its first rows are in the result; `chosen`: whether tokens were chosen for each.
        `likeliest`: see there; `logprobs`: how many alternatives' log-probabilities each row wants.

        `logits`: [outputs, vocabulary]; `choices`: [outputs, 2 * candidates] float64, tokens and then their scores, the
        first of which is not a number where the host must choose.
        """
        chosen = chosen & (choices is not None)
        if len(rows) == self._rows:  # the only part, in order
            self._part, self._at, self._chosen = [0] * self._rows, range(self._rows), chosen.tolist()
        else:
            if not self._logits:
                self._part, self._at, self._chosen = ([0] * self._rows, [0] * self._rows, [False] * self._rows)
            for at, (row, one) in enumerate(zip(rows.tolist(), chosen.tolist(), strict=True)):
                self._part[row], self._at[row], self._chosen[row] = len(self._logits), at, one  # type: ignore[index]
        self._logits.append(logits)
        self._choices.append(choices)
        self._likeliest.append(likeliest if any(wanted is not None for wanted in logprobs) else None)
        self._logprobs.append(logprobs)

    def fetch(self) -> None:
        """Read the chosen tokens. Here the host waits for the device, once a pass."""
        for choices in self._choices:
            if choices is None:
                self._best.append(None)
                self._firsts.append(([], []))
                continue
            found = choices.cpu().numpy()
            count = found.shape[1] // 2
            tokens, scores = found[:, :count].astype(np.int64), found[:, count:]
            self._best.append(BestTokens(tokens, scores))
            self._firsts.append((tokens[:, 0].tolist(), (scores[:, 0] - scores[:, 1]).tolist()))
        self._likely = [None if it is None else it.cpu().numpy() for it in self._likeliest]

    @property
    def only_choices(self) -> Tensor | None:
        """The choices of all rows in order, if they are one part: [at least all rows, 2 * candidates]."""
        return self._choices[0] if len(self._choices) == 1 else None

    def row(self, index: int) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self._logits[self._part[index]][self._at[index]].to("cpu", copy=True).numpy()
        return row

    def choice(self, index: int) -> Choice | None:
        if not self._chosen[index]:
            return None
        tokens, gaps = self._firsts[self._part[index]]
        at = self._at[index]
        if math.isnan(gaps[at]):
            return None
        entry = self._entry(self._part[index], at)
        return None if entry is None else Choice(tokens[at], gaps[at], entry)

    def best(self, index: int) -> BestTokens | None:
        found = self._best[self._part[index]] if self._chosen[index] else None
        if found is None:
            return None
        at = self._at[index]
        return None if math.isnan(found.scores[at][0]) else BestTokens(found.tokens[at], found.scores[at])

    def score(self, rows: Sequence[int], tokens: Sequence[int], alternatives: int) -> ScoredTokens:
        logits = torch.stack([self._logits[self._part[row]][self._at[row]] for row in rows])
        wanted = torch.tensor(tokens, device=logits.device)
        ranks = (logits > logits.gather(1, wanted[:, None])).sum(1, keepdim=True) + 1
        found = torch.cat((likeliest(logits, wanted), ranks.double()), 1).cpu().numpy()
        entries = b"".join(_packed(row[:-1], alternatives) for row in found)
        return ScoredTokens(entries, tuple(found[:, -1].astype(int).tolist()))

    def _entry(self, part: int, at: int) -> bytes | None:
        """Return the log-probabilities that a row wants, empty if it wants none; None if the host must compute them."""
        wanted = self._logprobs[part][at] if self._logprobs[part] else None
        if wanted is None:
            return b""
        likely = self._likely[part]
        if likely is None:
            return None
        scores = likely[at, 2 + TOP :]
        if wanted and scores[wanted - 1] == scores[wanted] > -math.inf:
            return None  # it is open which of equal tokens is the last one
        return _packed(likely[at], wanted)

    def all(self) -> NDArray[np.float32]:
        """Return all rows: [rows, vocabulary], with one copy where there is one part."""
        if not self._logits:
            return np.empty((0, self.vocabulary), np.float32)
        parts = [logits.to("cpu", copy=True).numpy() for logits in self._logits]
        if len(parts) == 1:
            return parts[0][: self._rows]  # a part's rows are in the order of the result
        return np.stack([parts[part][at] for part, at in zip(self._part, self._at, strict=True)])


def _packed(likely: NDArray[np.float64], wanted: int) -> bytes:
    """Return the entry of a token with `wanted` alternatives. `likely`: a row of `likeliest`."""
    tokens, scores = likely[2 : 2 + wanted], likely[2 + TOP : 2 + TOP + wanted]
    known = np.isfinite(scores)
    return packed(likely[0], tokens[known].astype(np.int64), scores[known], likely[1], wanted)
