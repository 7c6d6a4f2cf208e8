"""Attention of `transformers` models over Outrider's cache, through the registries of that library.

A model that builds its masks with the library's functions and attends through its attention interface calls this
module. Its rows then see what the segments of a pass define. The model's own mask function decides about sliding
windows, chunks and other limits of a layer, by position and not by cache row: in a tree the two differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from outrider.engine.interface.batch import Segment
from outrider.engine.interface.masks import visible_keys

NAME = "outrider"  # of this attention, in transformers' registries
HIDDEN = -1e30  # added to the score of a hidden key; finite, so that a row with hidden keys alone does not become NaN
LEAST_WIDTH = 2  # a single row is computed differently

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) -> whether it is seen


class AttentionBatch:
    """The rows of one model call, of some slots, padded to one width. Padding rows see the first key alone."""

    def __init__(self, segments: Sequence[Segment], positions: Tensor, pad: int = 0) -> None:
        """`segments`: ordered by slot; `positions`: [slots, rows] int64, of all cache rows, the segments' included."""
        self.segments = segments
        self.width = max(LEAST_WIDTH, *(len(segment.tokens) for segment in segments))
        # At least as many as queries, which some models require. Keys beyond the segments' rows are hidden.
        self.keys = max(self.width, *(segment.prefix + segment.span for segment in segments))
        self.slots = [segment.slot for segment in segments]
        self._first = self.slots[0] if self.slots == [*range(self.slots[0], self.slots[-1] + 1)] else None
        self._index = torch.tensor(self.slots)
        tokens = np.full((len(segments), self.width), pad, np.int64)
        at = np.zeros((len(segments), self.width), np.int64)
        for row, segment in enumerate(segments):
            count = len(segment.tokens)
            tokens[row, :count], at[row, :count] = segment.tokens, segment.positions
        visible = visible_keys(segments, range(len(segments)), (len(segments), self.width, self.keys))
        self.tokens = torch.from_numpy(tokens)  # [batch, width]
        self.positions = torch.from_numpy(at)  # [batch, width]
        self._visible = torch.from_numpy(visible)[:, None]  # [batch, 1, width, keys]
        self._key_positions = self.read(positions[:, None, :, None])[:, 0, :, 0]  # [batch, keys]
        self._written = _cells(segments)
        self._masks: dict[torch.dtype, Tensor] = {}
        self._folded: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def read(self, rows: Tensor) -> Tensor:
        """Return the rows of a layer's [slots, kv_head, rows, dim] that the call reads: [batch, kv_head, keys, dim]."""
        if self._first is not None:
            return rows[self._first : self._first + len(self.slots), :, : self.keys]
        return rows[:, :, : self.keys].index_select(0, self._index)

    def write(self, rows: Tensor, new: Tensor) -> None:
        """Write the new rows, [batch, kv_head, width, dim], to the rows of the segments; padding is not written."""
        if len(self.segments) == 1:
            segment = self.segments[0]
            end, count = segment.prefix + segment.span, len(segment.tokens)
            rows[segment.slot, :, end - count : end].copy_(new[0, :, :count])
        else:
            slots, cells, batch, columns = self._written
            rows[slots, :, cells] = new[batch, :, columns]

    def mask(self, dtype: torch.dtype, narrower: MaskFunction | None = None) -> Tensor:
        """Return what is added to the scores: [batch, 1, width, keys]. `narrower` hides more keys, by position."""
        visible = self._visible
        if narrower is not None:
            batch = torch.arange(len(self.slots))[:, None, None, None]
            query, key = self.positions[:, None, :, None], self._key_positions[:, None, None, :]
            visible = visible & narrower(batch, torch.zeros_like(batch), query, key)
        elif dtype in self._masks:
            return self._masks[dtype]
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, HIDDEN)
        if narrower is None:
            self._masks[dtype] = mask
        return mask

    def fold(self, mask: Tensor, group: int) -> Tensor:
        """Repeat a mask for a group: [batch, 1, width, keys] -> [batch, 1, group * width, keys]; cached in the call."""
        if group == 1:
            return mask
        known = self._folded.get((id(mask), group))
        if known is None:
            known = self._folded[id(mask), group] = mask, mask.repeat(1, 1, group, 1)
        return known[1]


current: ContextVar[AttentionBatch] = ContextVar("current")  # the call that is being computed


def install() -> None:
    """Register the attention with transformers."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(*, mask_function: Any, dtype: torch.dtype = torch.float32, **_: Any) -> Tensor:
    """Return the mask of one kind of layer; transformers calls this."""
    return current.get().mask(dtype, None if mask_function is causal_mask_function else mask_function)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention; transformers calls this. [batch, heads, width, dim] -> [batch, width, heads, dim].

    `softcap`: bounds the scores (Gemma 2); `s_aux`: [heads] scores of a key without a value (gpt-oss).
    Raises NotImplementedError for a bias that depends on the cache row.
    """
    if position_bias is not None:
        raise NotImplementedError("its attention is biased by the distance between cache rows")
    batch, heads, width, dim = query.shape
    group = heads // key.shape[1]
    mask = current.get().mask(query.dtype) if attention_mask is None else attention_mask.to(query.dtype)
    folded = query.reshape(batch, key.shape[1], group * width, dim)  # heads that share a key head become queries
    mask = current.get().fold(mask, group)
    if softcap is None and s_aux is None:
        result = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        scores = folded @ key.transpose(2, 3) * (dim**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = (scores + mask).float()
        if s_aux is not None:
            sinks = s_aux.float().view(1, -1, group, 1).expand(batch, -1, -1, width).reshape(*folded.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        result = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value
    return result.reshape(batch, heads, width, -1).transpose(1, 2).contiguous(), None


def _cells(segments: Sequence[Segment]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return slot, cache row, batch index and column of each new row."""
    counts = [len(segment.tokens) for segment in segments]
    ends = [segment.prefix + segment.span for segment in segments]
    slots = np.repeat([segment.slot for segment in segments], counts)
    rows = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    batch = np.repeat(np.arange(len(segments)), counts)
    columns = np.concatenate([np.arange(count) for count in counts])
    return torch.from_numpy(slots), torch.from_numpy(rows), torch.from_numpy(batch), torch.from_numpy(columns)
