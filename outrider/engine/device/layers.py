"""The arithmetic of a layer, in three functions over plain tensors that a compiler can fuse.

The residual stream, norms and rotations are float32; linears and KV have the type of the weights. The end of a layer
and the beginning of the next one are one function, so that no operation between them runs by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from outrider.engine.eager.weights import LayerWeights

Sum = Callable[[Tensor], Tensor]  # the sum over all ranks


class LayerForm(NamedTuple):
    """The sizes of all layers, of one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float


class Rotation(NamedTuple):
    """The RoPE angles of a pass's rows: [rows, 1, head_dim / 2] float32."""

    cos: Tensor
    sin: Tensor


NewRows = tuple[Tensor, Tensor]  # queries [rows, heads, dim]; keys and values [rows, 2, kv_heads, dim]


def begin(layer: LayerWeights, form: LayerForm, hidden: Tensor, rotation: Rotation) -> NewRows:
    """Return a layer's queries, keys and values from the residual stream [rows, width]."""
    new = _linear(normed(hidden, layer.attention_norm, form.eps), layer.qkv, layer.qkv_bias)
    shaped = new.view(len(new), form.heads + 2 * form.kv_heads, form.head_dim)
    sizes = [form.heads, form.kv_heads, form.kv_heads]
    queries, keys, values = torch.split(shaped, sizes, 1)
    queries = _rotated(queries, layer.query_norm, form.eps, rotation)
    keys = _rotated(keys, layer.key_norm, form.eps, rotation)
    return queries, torch.stack((keys, values), 1)


def end(layer: LayerWeights, form: LayerForm, hidden: Tensor, attended: Tensor, add: Sum) -> Tensor:
    """Return the residual stream after a layer: [rows, width]. `attended`: [rows, heads * dim]."""
    hidden = hidden + add(_linear(attended, layer.output, layer.output_bias)).float()
    gate_up = _linear(normed(hidden, layer.ffn_norm, form.eps), layer.gate_up, layer.gate_up_bias)
    units = silu(gate_up[:, : form.ffn]) * gate_up[:, form.ffn :]
    return hidden + add(_linear(units, layer.down, layer.down_bias)).float()


def between(
    layer: LayerWeights,
    following: LayerWeights,
    form: LayerForm,
    hidden: Tensor,
    attended: Tensor,
    rotation: Rotation,
    add: Sum,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the end of a layer and the beginning of the next; return the residual stream and the new rows."""
    hidden = end(layer, form, hidden, attended, add)
    return hidden, *begin(following, form, hidden, rotation)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x**2) + eps) * weight` in float32 (arXiv 1910.07467)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def head(x: Tensor, weight: Tensor) -> Tensor:
    """Return logits in float32: [rows, width] float32 and [vocabulary, width] -> [rows, vocabulary].

    bfloat16 weights are read once and not converted. Their inputs keep 16 bits, as the sum of two bfloat16 numbers,
    which are twice as many rows of one product.
    """
    if weight.dtype == torch.float32:
        return linear(x, weight)
    if x.device.type != "cuda":
        return linear(x, weight.float())
    high = x.to(weight.dtype)
    low = (x - high.float()).to(weight.dtype)
    both = torch.mm(torch.cat((high, low)), weight.t(), out_dtype=torch.float32)
    return both[: len(x)] + both[len(x) :]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x.to(weight.dtype), weight, bias)


def _rotated(x: Tensor, weight: Tensor | None, eps: float, rotation: Rotation) -> Tensor:
    """Return queries or keys [rows, heads, dim] rotated by RoPE, after a norm where a model has it, in their type."""
    rotated = x.float() if weight is None else normed(x, weight, eps)
    first, second = rotated.chunk(2, -1)
    parts = first * rotation.cos - second * rotation.sin, second * rotation.cos + first * rotation.sin
    return torch.cat(parts, -1).to(x.dtype)
