"""EAGLE (Li et al., arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840): one layer that predicts the target's features.

The input of a row is a token and the feature of the row before it. The layer predicts the feature of the row itself:
the target's head gives the next token's logits from it, and it is an input of the next row, with the token drafted
there. Tensors may have any leading dimensions; `attend` decides which rows see which, so training and drafting share
this module.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from outrider.engine.heads.config import HeadsConfig
from outrider.engine.heads.embeddings import Unembed

# Rotated queries [..., rows, heads, dim], keys and values [..., rows, kv_heads, dim] -> [..., rows, heads * dim].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class EagleDecoderLayer(nn.Module):
    """A decoder layer like Llama's, without a norm before attention, whose input may be wider than the stream."""

    def __init__(self, shape: HeadsConfig, inputs: int) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._dim = shape.heads, shape.kv_heads, shape.head_dim
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.qkv = nn.Linear(inputs, queries + 2 * keys, bias=False)
        self.output = nn.Linear(queries, shape.width, bias=False)
        self.norm = nn.RMSNorm(shape.width, shape.eps)
        self.gate_up = nn.Linear(shape.width, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, inputs: Tensor, residual: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """Return the residual stream behind the layer: [..., rows, width].

        `inputs`: of the attention, [..., rows, inputs]; `residual`: [..., rows, width]; `rotations`: of RoPE,
        [rows, head_dim / 2] complex.
        """
        shaped = self.qkv(inputs).unflatten(-1, (-1, self._dim))
        query, key, value = shaped.split([self._heads, self._kv_heads, self._kv_heads], -2)
        hidden = residual + self.output(attend(_rotated(query, rotations), _rotated(key, rotations), value))
        gate, up = self.gate_up(self.norm(hidden)).chunk(2, -1)
        changed: Tensor = hidden + self.down(silu(gate) * up)
        return changed


class Eagle(nn.Module):
    """EAGLE-1: features are the inputs of the target's head."""

    def __init__(self, shape: HeadsConfig) -> None:
        super().__init__()
        self.join = nn.Linear(2 * shape.width, shape.width)
        self.layer = EagleDecoderLayer(shape, shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if shape.own_head else None

    def enter(self, features: Tensor) -> Tensor:
        """Return the states for rows of true features: [..., width]."""
        return features

    def forward(self, embedded: Tensor, states: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """Return the states of the rows: [..., rows, width].

        `embedded`: the embedding of each row's token; `states`: the state of the row before each.
        """
        joined = self.join(torch.cat([embedded, states], -1)).float()
        following: Tensor = self.layer(joined, joined, rotations, attend)
        return following

    def logits(self, states: Tensor, unembed: Unembed) -> Tensor:
        """Return the logits of the token that follows each row: [..., vocabulary]."""
        logits: Tensor = unembed(states) if self.head is None else self.head(states)
        return logits


class Eagle3(nn.Module):
    """EAGLE-3: true features are the joined outputs of several layers, which its own states need not resemble."""

    def __init__(self, shape: HeadsConfig) -> None:
        super().__init__()
        self.fuse = nn.Linear(len(shape.layers) * shape.width, shape.width, bias=False)
        self.token_norm = nn.RMSNorm(shape.width, shape.eps)
        self.state_norm = nn.RMSNorm(shape.width, shape.eps)
        self.layer = EagleDecoderLayer(shape, 2 * shape.width)
        self.norm = nn.RMSNorm(shape.width, shape.eps)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if shape.own_head else None

    def enter(self, features: Tensor) -> Tensor:
        """Return the states for rows of true features: [..., layers * width] to [..., width]."""
        fused: Tensor = self.fuse(features).float()
        return fused

    def forward(self, embedded: Tensor, states: Tensor, rotations: Tensor, attend: Attend) -> Tensor:
        """Return the states of the rows; see `Eagle.forward`."""
        inputs = torch.cat([self.token_norm(embedded), self.state_norm(states)], -1)
        following: Tensor = self.layer(inputs, states, rotations, attend)
        return following

    def logits(self, states: Tensor, unembed: Unembed) -> Tensor:
        """Return the logits of the token that follows each row: [..., vocabulary]."""
        normed = self.norm(states)
        logits: Tensor = unembed(normed) if self.head is None else self.head(normed)
        return logits


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend so that each row sees itself and the rows before it, as in training."""
    query, key, value = (it.transpose(-2, -3) for it in (query, key, value))
    attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended.transpose(-2, -3).flatten(-2)


def _rotated(x: Tensor, rotations: Tensor) -> Tensor:
    """Apply RoPE over halves, the layout of checkpoints in Hugging Face format: [..., rows, heads, dim]."""
    left, right = x.float().chunk(2, -1)
    cos, sin = rotations.real.unsqueeze(-2), rotations.imag.unsqueeze(-2)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)
