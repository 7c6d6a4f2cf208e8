"""Any causal model of `transformers` that can verify trees, through its own modules and over our cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.batch import Segment
from outrider.engine.engine import Engine, Traits
from outrider.engine.group import ALONE, RankLost, TensorGroup
from outrider.engine.pretrained import Pretrained, plain_tensor
from outrider.engine.row_cache import RowCache
from outrider.engine.threads import Threads
from outrider.engine.tree_attention import NAME, Batch, install, present

NARROW = 16  # rows up to which segments go together whatever their lengths
NEAR = 1024  # keys up to which they do

# How a model gets its masks: it asks for them, or it takes the one that it is given.
Masks = Literal["asked", "given"]


class TransformersEngine(Engine):
    """One rank's part of a model, or all of it: one model call for the segments of about one size.

    The KV is of the type that the model computes in, and so are its logits before they are returned in float32. A
    row's last bits depend on what else the call holds. The logits are on rank 0 alone; the others get none.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        *,
        masks: Masks = "asked",
        slots: int,
        rows: int,
        threads: int,
        group: TensorGroup = ALONE,
    ) -> None:
        """Takes the model over: no other engine may use it at the same time."""
        install()
        pretrained.attend_by(NAME if masks == "asked" else pretrained.attention)
        self._model = pretrained.model
        self._inputs = pretrained.inputs
        self._masks = masks
        self._threads = Threads(threads)
        self._group = group
        self._cache = RowCache(slots, rows)
        self._last = pretrained.context - 1
        super().__init__(traits_of(pretrained, slots=slots, rows=rows))
        with torch.inference_mode():
            self._call([Segment(0, 0, np.zeros(1, np.int64), np.zeros(1, np.int64))])  # makes the KV of all layers
        self.kv_bytes = self._cache.bytes

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        self.check_segments(segments)
        self._threads.prepare()
        logits: dict[int, Tensor] = {}
        with torch.inference_mode():
            for batch in batches(segments):
                logits.update(self._call(batch))
        if self._group.shard.rank:
            return np.empty((0, self.vocabulary), np.float32)
        return torch.cat([logits[segment.slot] for segment in segments]).numpy()

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        self.check_move(slot, source, destination)
        with torch.inference_mode():
            self._cache.move(slot, torch.from_numpy(source), torch.from_numpy(destination))

    def copy(self, source: int, target: int, rows: int) -> None:
        self.check_copy(source, target, rows)
        with torch.inference_mode():
            self._cache.copy(source, target, rows)

    def _call(self, segments: Sequence[Segment]) -> dict[int, Tensor]:
        """One model call: the logits that each slot's segment wants."""
        for segment in segments:
            end = segment.prefix + segment.span
            self._cache.positions[segment.slot, end - len(segment.tokens) : end] = torch.from_numpy(segment.positions)
        batch = Batch(segments, self._cache.positions)
        inputs = {"input_ids": batch.tokens, "past_key_values": self._cache, "use_cache": True}
        if "position_ids" in self._inputs:
            # A draft may go beyond the context; what is said of it there is of no use, but must not fail.
            inputs["position_ids"] = batch.positions.clamp_max(self._last)
        if self._masks == "given":
            inputs["attention_mask"] = batch.mask(self._model.dtype)
        wanted = _columns(segments, batch.width)
        if "logits_to_keep" in self._inputs:
            inputs["logits_to_keep"] = wanted
        token = present.set(batch)
        try:
            logits = plain_tensor(self._model(**inputs).logits)
        except RuntimeError as error:
            if self._group.shard.of > 1:
                raise RankLost(f"rank {self._group.shard.rank} has lost another one: {error}") from error
            raise
        finally:
            present.reset(token)
        if logits.shape[1] != len(wanted):
            logits = logits[:, wanted]
        logits = logits[..., : self.vocabulary].float()
        at = {int(column): place for place, column in enumerate(wanted)}
        rows = [[at[column] for column in _wanted(segment)] for segment in segments]
        return {segment.slot: logits[row, mine] for row, (segment, mine) in enumerate(zip(segments, rows, strict=True))}


def traits_of(pretrained: Pretrained, *, slots: int, rows: int, treeless: str = "") -> Traits:
    """What an engine over that model says of itself; it adds the bytes of its KV."""
    return Traits(
        vocabulary=pretrained.vocabulary,
        context=pretrained.context,
        positions=max(rows, pretrained.context),
        rows=rows,
        slots=slots,
        parameters=pretrained.parameters,
        dtype=pretrained.dtype,
        numerics="fast",
        tokenizer_digest=pretrained.tokenizer_digest,
        eos_ids=pretrained.eos_ids,
        weight_bytes=pretrained.weight_bytes,
        kv_bytes=0,
        treeless=treeless,
    )


def batches(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments that go through the model together, by slot: padding costs at most a factor where it costs at all."""
    found: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda segment: (-len(segment.tokens), -segment.prefix)):
        for batch in found:
            if _alike(batch[0], segment):
                batch.append(segment)
                break
        else:
            found.append([segment])
    return [sorted(batch, key=lambda segment: segment.slot) for batch in found]


def _alike(first: Segment, other: Segment) -> bool:
    """Whether the other, which has no more rows, may be padded to the first one's sizes, or the first to its keys."""
    width, keys = len(first.tokens), (first.prefix + first.span, other.prefix + other.span)
    return (width <= NARROW or width <= 2 * len(other.tokens)) and (max(keys) <= NEAR or max(keys) <= 4 * min(keys))


def _wanted(segment: Segment) -> range:
    count = len(segment.tokens)
    return range(count - segment.outputs, count)


def _columns(segments: Sequence[Segment], width: int) -> Tensor:
    """Columns of a batch whose logits somebody wants. Never a single row: that is computed differently."""
    columns = sorted({column for segment in segments for column in _wanted(segment)}) or [0]
    if len(columns) == len(segments) == 1:
        columns.append((columns[0] + 1) % width)
    return torch.tensor(columns)
