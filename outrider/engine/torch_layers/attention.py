"""The attention of a pass on torch, one call for each run of neighbouring slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.engine.interface.masks import visible_keys
from outrider.engine.torch_layers.packing import AttentionRun, Packed

# Added to the score of a hidden key. Finite, so that a block of hidden keys alone does not become NaN.
HIDDEN = np.float32(-1e30)

# One layer's attention over a run, from its queries [slots * width, heads * dim] and from keys and values
# [slots, kv_head, keys, dim]: [slots * width, heads * dim]. Heads are ordered group first.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class FastAttention:
    """One call of torch's fused attention for each run. A row's last bits depend on the other rows of the run."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        self._kv_heads = kv_heads
        self._group = heads // kv_heads

    def prepare(self, run: AttentionRun) -> Attend:
        """Return the attention of a run, with the mask that all layers of a pass share."""
        mask = None if _all_visible(run) else fold_mask(score_mask(run), self._group)

        def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # The group of a KV head is folded into the queries.
            folded = query.view(run.slots, -1, self._kv_heads, keys.shape[-1]).transpose(1, 2)
            result = scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
            return result.transpose(1, 2).reshape(query.shape)

        return attend


def attend_runs(
    query: Tensor, packed: Packed, calls: Sequence[Attend], seen: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return one layer's attention over a pass: [rows, heads * dim]. `seen`: keys and values that each run reads."""
    if packed.gather is not None:
        query = query.index_select(0, packed.gather)
    results = []
    for run, attend, (keys, values) in zip(packed.runs, calls, seen, strict=True):
        part = query if len(packed.runs) == 1 else query[run.start : run.stop]
        results.append(attend(part, keys, values))
    attended = results[0] if len(results) == 1 else torch.cat(results)
    return attended if packed.scatter is None else attended.index_select(0, packed.scatter)


def score_mask(run: AttentionRun) -> NDArray[np.float32]:
    """Return what is added to the scores: [slots, width, keys]. Padding queries see the first key alone."""
    places = [segment.slot - run.slot for segment in run.segments]
    visible = visible_keys(run.segments, places, (run.slots, run.width, run.keys))
    return np.where(visible, np.float32(0.0), HIDDEN)


def fold_mask(mask: NDArray[np.float32], group: int) -> Tensor:
    """Repeat a mask for a group: [slots, width, keys] -> [slots, 1, width * group, keys]."""
    slots, _, keys = mask.shape
    return torch.from_numpy(mask)[:, None, :, None].expand(-1, 1, -1, group, -1).reshape(slots, 1, -1, keys)


def _all_visible(run: AttentionRun) -> bool:
    """Return whether all queries of a run see all of its keys, so that no mask is needed."""
    return len(run.segments) == run.slots and all(
        len(segment.tokens) == 1
        and segment.prefix + segment.span == run.keys
        and (segment.mask is None or bool(segment.mask.all()))
        for segment in run.segments
    )
