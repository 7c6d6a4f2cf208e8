"""The attention of rows over one text on a CPU."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend_text(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
    """Return the attention of rows over one text, by one call of torch's fused attention: [rows, heads, dim].

    `query`: [rows, heads, dim]; `keys`, `values`: [kv_heads, n, dim]; `seen`: which keys each row sees, [rows, n] bool,
    None: all.
    """
    kv_heads, _, dim = keys.shape
    group = query.shape[1] // kv_heads
    # The group of a KV head is folded into the rows, so that no key is copied.
    folded = query.view(-1, kv_heads, group, dim).permute(1, 2, 0, 3).flatten(1, 2)
    mask = None if seen is None else seen.repeat(group, 1)
    attended = scaled_dot_product_attention(folded[None], keys[None], values[None], attn_mask=mask)
    return attended.view(kv_heads, group, -1, dim).permute(2, 0, 1, 3).flatten(1, 2)
