"""The functions of a pass with operations of torch, which run on all devices: the reference of `triton_kernels`.

The residual stream, norms and rotations are float32; linears and KV have the type of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from outrider.engine.gpu.adapters.low_rank import add_low_rank_by_address as add_low_rank
from outrider.engine.gpu.attention.page_table import PAGE_ROWS
from outrider.engine.gpu.attention.tree_attention import segment_attention as attend
from outrider.engine.gpu.kernels import LayerForm
from outrider.engine.gpu.sampling import sampling

__all__ = ["add_low_rank", "attend", "choose", "gate", "head", "move", "norm", "rotate"]


def norm(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, delta: Tensor | None = None) -> Tensor:
    """See `Kernels.norm`."""
    if delta is not None:
        hidden += delta.float()
    return (hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps) * weight).to(dtype)


def rotate(
    new: Tensor,
    form: LayerForm,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache: Tensor,
    places: Tensor,
    norms: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """See `Kernels.rotate`."""
    shaped = new.view(len(new), form.heads + 2 * form.kv_heads, form.head_dim)
    queries, keys, values = torch.split(shaped, [form.heads, form.kv_heads, form.kv_heads], 1)
    angles = cos[positions][:, None], sin[positions][:, None]
    if norms is not None:
        queries, keys = (
            norm(it.float(), by, form.eps, torch.float32) for it, by in zip((queries, keys), norms, strict=True)
        )
    pages, rows = places // PAGE_ROWS, places % PAGE_ROWS
    cache[0, pages, :, rows] = _rotated(keys, *angles).to(new.dtype)
    cache[1, pages, :, rows] = values
    return _rotated(queries, *angles).to(new.dtype)


def gate(gate_up: Tensor) -> Tensor:
    """See `Kernels.gate`."""
    gates, up = gate_up.float().chunk(2, -1)
    return (silu(gates) * up).to(gate_up.dtype)


def head(hidden: Tensor, weight: Tensor, eps: float, rows: Tensor) -> Tensor:
    """See `Kernels.head`."""
    normed = norm(hidden, weight, eps, torch.float32)
    return linear(normed, rows.float())


def choose(
    parts: Tensor, logits: Tensor, keys: Tensor, temperatures: Tensor, unpadded: int, choices: Tensor | None
) -> None:
    """See `Kernels.choose`."""
    count, vocabulary = logits.shape
    logits.copy_(parts[:, :vocabulary].reshape(-1, count, vocabulary).sum(0))
    logits[:, unpadded:].fill_(-torch.inf)
    if choices is not None:
        steps = sampling.noise_steps(vocabulary, logits.device)
        candidates = choices.shape[1] // 2
        tokens, scores = sampling.best(sampling.scores(logits, keys, temperatures, steps), candidates)
        choices[:, :candidates] = tokens.double()
        choices[:, candidates:] = scores


def move(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """See `Kernels.move`."""
    read = cache[:, :, sources // PAGE_ROWS, :, sources % PAGE_ROWS]
    cache[:, :, targets // PAGE_ROWS, :, targets % PAGE_ROWS] = read


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys [rows, heads, dim] rotated by RoPE in float32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
