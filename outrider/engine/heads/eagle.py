"""EAGLE (Li et al., arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840): one layer that goes on in the target's features.

A row stands for a token and the feature of the row before it. What the layer gives is that row's own feature by its
guess, from which the target's head says the next token, and which is fed back with that. Shapes may have any leading
dimensions; `attend` decides which rows see which, so training and drafting share all of this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from outrider.engine.heads.ends import Unembed
from outrider.engine.heads.shape import Shape

# Queries [..., rows, heads, dim], keys and values [..., rows, kv_heads, dim], turned: to [..., rows, heads * dim].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """A decoder layer as Llama's, whose attention may see more than the residual stream, and has no norm before it."""

    def __init__(self, shape: Shape, inputs: int) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._dim = shape.heads, shape.kv_heads, shape.head_dim
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.qkv = nn.Linear(inputs, queries + 2 * keys, bias=False)
        self.output = nn.Linear(queries, shape.width, bias=False)
        self.norm = nn.RMSNorm(shape.width, shape.eps)
        self.gate_up = nn.Linear(shape.width, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, seen: Tensor, residual: Tensor, turns: Tensor, attend: Attend) -> Tensor:
        """[..., rows, inputs] and [..., rows, width] to [..., rows, width]. `turns`: [rows, head_dim / 2] complex."""
        shaped = self.qkv(seen).unflatten(-1, (-1, self._dim))
        query, key, value = shaped.split([self._heads, self._kv_heads, self._kv_heads], -2)
        hidden = residual + self.output(attend(_turned(query, turns), _turned(key, turns), value))
        gate, up = self.gate_up(self.norm(hidden)).chunk(2, -1)
        changed: Tensor = hidden + self.down(silu(gate) * up)
        return changed


class Eagle(nn.Module):
    """EAGLE-1: features are what goes into the target's head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.join = nn.Linear(2 * shape.width, shape.width)
        self.layer = Layer(shape, shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if shape.own_head else None

    def enter(self, features: Tensor) -> Tensor:
        """The state that a row of true features stands for: [..., width]."""
        return features

    def forward(self, embedded: Tensor, states: Tensor, turns: Tensor, attend: Attend) -> Tensor:
        """The next states: [..., rows, width]. `embedded`: of each row's token; `states`: of the row before it."""
        joined = self.join(torch.cat([embedded, states], -1)).float()
        following: Tensor = self.layer(joined, joined, turns, attend)
        return following

    def logits(self, states: Tensor, unembed: Unembed) -> Tensor:
        """What it says follows: [..., vocabulary]."""
        said: Tensor = unembed(states) if self.head is None else self.head(states)
        return said


class Eagle3(nn.Module):
    """EAGLE-3: true features are those of several layers, joined; its own states need not resemble them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fuse = nn.Linear(len(shape.layers) * shape.width, shape.width, bias=False)
        self.token_norm = nn.RMSNorm(shape.width, shape.eps)
        self.state_norm = nn.RMSNorm(shape.width, shape.eps)
        self.layer = Layer(shape, 2 * shape.width)
        self.norm = nn.RMSNorm(shape.width, shape.eps)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if shape.own_head else None

    def enter(self, features: Tensor) -> Tensor:
        """The state that a row of true features stands for: [..., layers * width] to [..., width]."""
        fused: Tensor = self.fuse(features).float()
        return fused

    def forward(self, embedded: Tensor, states: Tensor, turns: Tensor, attend: Attend) -> Tensor:
        """As of `Eagle`."""
        seen = torch.cat([self.token_norm(embedded), self.state_norm(states)], -1)
        following: Tensor = self.layer(seen, states, turns, attend)
        return following

    def logits(self, states: Tensor, unembed: Unembed) -> Tensor:
        """What it says follows: [..., vocabulary]."""
        normed = self.norm(states)
        said: Tensor = unembed(normed) if self.head is None else self.head(normed)
        return said


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every row sees itself and those before it: as texts are trained on."""
    query, key, value = (it.transpose(-2, -3) for it in (query, key, value))
    attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended.transpose(-2, -3).flatten(-2)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """RoPE over halves, as checkpoints in Hugging Face format have it: [..., rows, heads, dim]."""
    left, right = x.float().chunk(2, -1)
    cos, sin = turns.real.unsqueeze(-2), turns.imag.unsqueeze(-2)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)
