"""Medusa (Cai et al., arXiv 2401.10774): one head for each of the next positions, all from one hidden state."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.engine.heads.config import HeadsConfig
from outrider.engine.heads.embeddings import Unembed


class Medusa(nn.Module):
    """Head k predicts the token k positions behind the one that the target's head predicts from the same state.

    Each head has a residual block whose weights begin at zero, so that it begins as the target's head (section 2.1.1).
    """

    def __init__(self, shape: HeadsConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(shape.width, shape.width) for _ in range(shape.depth))
        for block in self.blocks:
            nn.init.zeros_(block.weight)  # type: ignore[arg-type]
            nn.init.zeros_(block.bias)  # type: ignore[arg-type]
        heads = shape.depth if shape.own_head else 0
        self.heads = nn.ModuleList(nn.Linear(shape.width, shape.vocabulary, bias=False) for _ in range(heads))

    def forward(self, features: Tensor, unembed: Unembed) -> Tensor:
        """Return logits [..., depth, vocabulary] from the inputs of the target's head, [..., width]."""
        states = [features + silu(block(features)) for block in self.blocks]
        if not self.heads:
            return unembed(torch.stack(states, -2))
        return torch.stack([head(state) for head, state in zip(self.heads, states, strict=True)], -2)
