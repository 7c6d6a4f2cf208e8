"""The MLP speculator (Wertheimer et al., arXiv 2404.19124): a state that takes in each drafted token."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import gelu

from outrider.engine.heads.config import HeadsConfig
from outrider.engine.heads.embeddings import Unembed


class MlpSpeculator(nn.Module):
    """Level k: state <- gelu(norm(W state + U embedding of the token)), with weights for each level; section 3.

    The embedding is the target's, through a linear; the paper has a table for each level, which would be most of the
    file. State and token have the paper's weights, so that the first state counts half after all levels.
    """

    def __init__(self, shape: HeadsConfig) -> None:
        super().__init__()
        sizes = [shape.width] + [shape.inner] * (shape.depth - 1)
        self.states = nn.ModuleList(nn.Linear(size, shape.inner, bias=False) for size in sizes)
        self.tokens = nn.ModuleList(nn.Linear(shape.width, shape.inner, bias=False) for _ in sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(shape.inner) for _ in sizes)
        self.head = nn.Linear(shape.inner, shape.vocabulary, bias=False) if shape.own_head else None
        self._of_state = 0.5 ** (0.5 / shape.depth)
        self._of_token = (1.0 - self._of_state**2) ** 0.5

    def forward(self, level: int, state: Tensor, embedded: Tensor) -> Tensor:
        """Return the state after a token: [..., inner].

        `state`: [..., inner], before level 0 the target's feature, [..., width]; `embedded`: the token's embedding,
        [..., width].
        """
        mixed = self._of_state * self.states[level](state) + self._of_token * self.tokens[level](embedded)
        return gelu(self.norms[level](mixed))

    def logits(self, state: Tensor, unembed: Unembed) -> Tensor:
        """Return the logits of the token that follows: [..., vocabulary]."""
        logits: Tensor = unembed(state) if self.head is None else self.head(state)
        return logits
