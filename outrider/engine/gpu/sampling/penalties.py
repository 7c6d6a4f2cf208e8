"""Penalties of repeated tokens on the device, which counts each slot's tokens. `outrider.core.sampling.filters` defines
them.

A slot's counts follow its session's committed tokens: a pass sends those that are new, and all of them where another
session has taken the slot. The tokens of a row's path come with the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.sampling.restriction import History
from outrider.engine.gpu.passes.staging import FLOAT, INTEGER, Staging, placed
from outrider.engine.gpu.sampling.restricted_rows import RestrictedRow, grouped

PATH_TOKENS = 2**12  # of all rows of a pass
_PROMPTED, _ANSWERED = 1, 2  # what a token of the prompt sets, and what one of the answer adds


class PenaltyInputs(NamedTuple):
    """What the choice reads for the rows that want logits."""

    counts: Tensor  # [slots + 1, vocabulary] int32: twice the occurrences in the answer, and 1 if the prompt has it
    slots: Tensor  # [outputs] int64; the last one has no counts
    repetition: Tensor  # [outputs] float64
    presence: Tensor  # [outputs] float64
    frequency: Tensor  # [outputs] float64
    used: Tensor  # [1] int64, number of tokens of paths
    paths: Tensor  # [tokens, 2] int64, rows and tokens


class PenaltyBuffers:
    """The counts and buffers of an engine, which recorded graphs read."""

    def __init__(self, slots: int, outputs: int, vocabulary: int, device: torch.device) -> None:
        row = (outputs,)
        kinds = (INTEGER, FLOAT, FLOAT, FLOAT)
        fields = [*placed([*((kind, row) for kind in kinds), (INTEGER, (1,)), (INTEGER, (PATH_TOKENS, 2))])]
        self._staging = Staging(fields[-1].stop, device)
        *self._rows, self._used, self._paths = map(self._staging.array, fields)
        self._paths_start = fields[-1].start
        self._counts = torch.zeros(slots + 1, vocabulary, dtype=torch.int32, device=device)
        self._device = PenaltyInputs(self._counts, *map(self._staging.tensor, fields))
        self._counted: list[tuple[History | None, int]] = [(None, 0)] * slots  # of each slot, and how many tokens
        self._no_slot = slots
        self.send([])

    def inputs(self, count: int) -> PenaltyInputs:
        """Return what the choice of `count` rows reads on the device."""
        counts, *rows, used, paths = self._device
        return PenaltyInputs._make([counts, *(part[:count] for part in rows), used, paths])

    def send(self, rows: Sequence[RestrictedRow | None]) -> NDArray[np.bool_]:
        """Count what is new, and begin to copy the rest. Return which rows fit; the host chooses for others."""
        self._staging.wait()
        fits, used = np.ones(len(rows), np.bool_), 0
        histories: dict[int, History] = {}
        for part, neutral in zip(self._rows, (self._no_slot, 1.0, 0.0, 0.0), strict=True):
            part.fill(neutral)
        for first, own in grouped(rows):
            slot, it = own[0].slot, own[0].restriction
            if it.history is None:
                continue
            histories[slot] = it.history
            for part, value in zip(self._rows, (slot, it.repetition, it.presence, it.frequency), strict=True):
                part[first : first + len(own)] = value
            for row, (_, _, _, path) in enumerate(own, first):
                if path is None or used + len(path) > PATH_TOKENS:
                    fits[row] = False
                    continue
                self._paths[used : used + len(path), 0], self._paths[used : used + len(path), 1] = row, path
                used += len(path)
        self._count(histories)
        self._used[0] = used
        self._staging.copy((0, self._paths_start + self._paths[:used].nbytes))
        return fits

    def _count(self, histories: Mapping[int, History]) -> None:
        """Bring the counts of slots up to date."""
        vocabulary, new = self._counts.shape[1], []
        for slot, history in histories.items():
            counted, length = self._counted[slot]
            if counted is not history:
                length = history.answer_position
                prompt = [token for token in history.tokens[:length] if token < vocabulary]
                self._counts[slot].zero_().index_fill_(0, self._sent(prompt), _PROMPTED)
            new += [slot * vocabulary + token for token in history.tokens[length:] if token < vocabulary]
            self._counted[slot] = history, len(history.tokens)
        if new:
            answered = torch.full((len(new),), _ANSWERED, dtype=torch.int32, device=self._counts.device)
            self._counts.view(-1).index_add_(0, self._sent(new), answered)

    def _sent(self, numbers: Sequence[int]) -> Tensor:
        """Return numbers on the device, without waiting for it."""
        return torch.tensor(numbers, dtype=torch.int64).to(self._counts.device, non_blocking=True)


def penalized(logits: Tensor, given: PenaltyInputs) -> Tensor:
    """Return the logits with penalties: [rows, vocabulary] float64."""
    rows, vocabulary = logits.shape
    counts = torch.zeros(rows + 1, vocabulary, dtype=torch.int32, device=logits.device)  # the last: of unused tokens
    counts[:rows] = given.counts[given.slots]
    unused = torch.arange(len(given.paths), device=logits.device) >= given.used
    at = given.paths[:, 0].clamp_max(rows).masked_fill(unused, rows)
    tokens = given.paths[:, 1].masked_fill(unused, 0)
    answered = torch.full_like(at, _ANSWERED, dtype=torch.int32)
    counts.view(-1).index_add_(0, at * vocabulary + tokens, answered)
    found = counts[:rows]
    repetition = given.repetition[:, None]
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(found > 0, repeated, logits)
    answered = found >> 1
    lowered = logits - (given.presence[:, None] + given.frequency[:, None] * answered)
    return torch.where(answered > 0, lowered, logits)
