"""The engine for causal models of `transformers` that can verify trees: runs their modules over Outrider's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine, Traits
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.tensor_parallel.group import RankLost
from outrider.engine.threads import TorchThreads
from outrider.engine.torch_layers.kv_cache import lazy_zeros
from outrider.engine.transformers.pretrained import Pretrained, plain_tensor
from outrider.engine.transformers.tree_attention import NAME, AttentionBatch, current, install

NARROW = 16  # rows up to which segments share a call whatever their numbers of rows
NEAR = 1024  # keys up to which segments share a call whatever their numbers of keys

# How a model gets its masks: "asked": it calls a mask function for them; "given": it uses the argument of the call.
Masks = Literal["asked", "given"]


class RowCache(Cache):
    """The keys and values of each layer, [slot, kv_head, row, dim]; the first ones that a model writes give the sizes.

    To transformers this is an empty cache: sessions differ in length, so the model must use the positions and masks of
    this package. A layer that keeps any other state raises.
    """

    def __init__(self, slots: int, rows: int) -> None:
        super().__init__(layers=[])
        self.positions = torch.zeros(slots, rows, dtype=torch.int64)  # of each row's token, by slot
        self._slots, self._rows = slots, rows
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: keys, values

    @property
    def bytes(self) -> int:
        """Bytes of the cache when all rows have been written."""
        return sum(part.nbytes for part in self._parts())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new rows of the current call, and return the rows that the call reads."""
        if layer_idx not in self._kept:
            self._kept[layer_idx] = self._allocate(key_states), self._allocate(value_states)
        keys, values = self._kept[layer_idx]
        batch = current.get()
        batch.write(keys, key_states)
        batch.write(values, value_states)
        return batch.read(keys), batch.read(values)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys that the current call reads, and the first of them."""
        return current.get().keys, 0

    def move(self, slot: int, source: Tensor, destination: Tensor) -> None:
        """Move rows of one slot, in all layers. All rows are read before one is written."""
        for part in self._parts():
            rows = part[slot]
            rows.index_copy_(1, destination, rows.index_select(1, source))
        self.positions[slot].index_copy_(0, destination, self.positions[slot].index_select(0, source))

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` rows of one slot to another, in all layers."""
        for part in self._parts():
            part[target, :, :count].copy_(part[source, :, :count])
        self.positions[target, :count].copy_(self.positions[source, :count])

    def _allocate(self, new: Tensor) -> Tensor:
        """Return memory for rows of that shape and type in all slots."""
        return lazy_zeros(self._slots, new.shape[1], self._rows, new.shape[3], dtype=new.dtype)

    def _parts(self) -> list[Tensor]:
        return [part for layer in self._kept.values() for part in layer]


class TransformersEngine(Engine):
    """A model, or a rank's part of it. A pass is one model call for each set of segments of similar size.

    KV and logits have the type in which the model computes; `forward` returns float32. A row's last bits depend on the
    other rows of its call. Only rank 0 has the logits.
    """

    def __init__(self, pretrained: Pretrained, settings: EngineSettings, *, masks: Masks = "asked") -> None:
        """Make an engine over a model, which no other engine may use at the same time."""
        install()
        pretrained.set_attention(NAME if masks == "asked" else pretrained.attention)
        self._model = pretrained.model
        self._inputs = pretrained.inputs
        self._masks = masks
        self._threads = TorchThreads(settings.threads or torch.get_num_threads())
        self._group = settings.group
        self._last = pretrained.context - 1
        super().__init__(traits_of(pretrained, settings))
        self._cache = RowCache(self.slots, self.rows)
        with torch.inference_mode():
            self._call([Segment(0, 0, np.zeros(1, np.int64), np.zeros(1, np.int64))])  # allocates the KV of all layers
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
        """Run one model call, and return the wanted logits by slot."""
        for segment in segments:
            end = segment.prefix + segment.span
            self._cache.positions[segment.slot, end - len(segment.tokens) : end] = torch.from_numpy(segment.positions)
        batch = AttentionBatch(segments, self._cache.positions)
        inputs = {"input_ids": batch.tokens, "past_key_values": self._cache, "use_cache": True}
        if "position_ids" in self._inputs:
            # Drafts may reach beyond the context: their logits there are not used, but the call must not fail.
            inputs["position_ids"] = batch.positions.clamp_max(self._last)
        if self._masks == "given":
            inputs["attention_mask"] = batch.mask(self._model.dtype)
        wanted = _columns(segments, batch.width)
        if "logits_to_keep" in self._inputs:
            inputs["logits_to_keep"] = wanted
        token = current.set(batch)
        try:
            logits = plain_tensor(self._model(**inputs).logits)
        except RuntimeError as error:
            if self._group.shard.of > 1:
                raise RankLost(f"rank {self._group.shard.rank} has lost another one: {error}") from error
            raise
        finally:
            current.reset(token)
        if logits.shape[1] != len(wanted):
            logits = logits[:, wanted]
        logits = logits[..., : self.vocabulary].float()
        at = {int(column): place for place, column in enumerate(wanted)}
        rows = [[at[column] for column in _wanted(segment)] for segment in segments]
        return {it.slot: logits[row, columns] for row, (it, columns) in enumerate(zip(segments, rows, strict=True))}


def traits_of(pretrained: Pretrained, settings: EngineSettings, treeless: str = "") -> Traits:
    """Return the traits of an engine over a model, without the bytes of its KV."""
    rows = settings.rows_for(pretrained.context)
    return Traits(
        vocabulary=pretrained.vocabulary,
        context=pretrained.context,
        positions=max(rows, pretrained.context),
        rows=rows,
        slots=settings.slots,
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
    """Return sets of segments that share a model call, each by slot. They are of similar size, which bounds padding."""
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
    """Return whether `other`, which has no more rows than `first`, may share a call with it."""
    width, keys = len(first.tokens), (first.prefix + first.span, other.prefix + other.span)
    return (width <= NARROW or width <= 2 * len(other.tokens)) and (max(keys) <= NEAR or max(keys) <= 4 * min(keys))


def _wanted(segment: Segment) -> range:
    """Return the rows of a segment whose logits are wanted."""
    count = len(segment.tokens)
    return range(count - segment.outputs, count)


def _columns(segments: Sequence[Segment], width: int) -> Tensor:
    """Return the columns of a batch with wanted logits, at least two: a single row is computed differently."""
    columns = sorted({column for segment in segments for column in _wanted(segment)}) or [0]
    if len(columns) == len(segments) == 1:
        columns.append((columns[0] + 1) % width)
    return torch.tensor(columns)
