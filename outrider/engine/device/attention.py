"""Implementations of the attention of a pass on a device. All have the same signature; a recording uses the fastest.

Queries are [slots, width * group, kv_heads, dim], with the group of a KV head folded into them. Keys and values are
[slots, kv_heads, context, dim], views of the cache or copies. The mask is added to the scores: [slots, 1, width *
group, context] in the type of the queries, 0 or, for a hidden key, a large negative number. An added mask is a plain
buffer that each pass fills, whatever the shape of its trees, so a recorded graph can read it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # queries, keys, values, mask -> the shape of queries

# Added to the score of a hidden key. Finite, so that no row becomes NaN; bfloat16 can hold it.
HIDDEN = -1e30


def fused(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Compute attention with torch's fastest kernel for an added mask."""
    return scaled_dot_product_attention(queries.transpose(1, 2), keys, values, attn_mask=mask).transpose(1, 2)


def products(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Compute attention as two products and a softmax in float32.

    For few queries this uses more of a device than a fused kernel does.
    """
    scores = torch.matmul(queries.transpose(1, 2), keys.transpose(2, 3)).float()
    weights = torch.softmax(scores * queries.shape[-1] ** -0.5 + mask, -1)
    return torch.matmul(weights.to(values.dtype), values).transpose(1, 2)


def flexible(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Compute flex attention, which splits long contexts among processors. It is fast only when compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    def masked(score: Tensor, slot: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + mask[slot, 0, query, key]

    result = flex_attention(queries.transpose(1, 2), keys, values, score_mod=masked)
    assert isinstance(result, Tensor)
    return result.transpose(1, 2)


def visible(prefixes: Tensor, trees: Tensor, context: int, kind: torch.dtype, group: int) -> Tensor:
    """Return the mask of a pass. `prefixes`: [slots]; `trees`: [slots, width, span] bool, of rows behind the prefix.

    A query of a padding row has no tree, and sees the first key alone.
    """
    slots, width, span = trees.shape
    column = torch.arange(context, device=trees.device)
    behind = column - prefixes[:, None]  # [slots, context]
    inside = (behind >= 0) & (behind < span)
    index = behind.clamp(0, span - 1)[:, None, :].expand(slots, width, context)
    used = trees.any(-1, keepdim=True)
    seen = (trees.gather(2, index) & inside[:, None]) | (used & (behind < 0)[:, None]) | (~used & (column == 0))
    added = torch.where(seen, 0.0, HIDDEN).to(kind)
    return added[:, None, :, None].expand(-1, 1, -1, group, -1).reshape(slots, 1, width * group, context)
