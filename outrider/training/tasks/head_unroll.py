"""Computes the guesses of heads along a text, at every depth below every root at once, to train and to measure them.

The root of row i is the text's token i + 1: the target has read up to token i, whose feature is known, and chose the
root there. The guess at depth d is for token i + 2 + d, of a chain that followed the text so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outrider.engine.checkpoints.rope import Rope
from outrider.engine.heads.checkpoint_io import Network
from outrider.engine.heads.config import HeadsConfig
from outrider.engine.heads.eagle import Eagle, Eagle3, attend_causally
from outrider.engine.heads.embeddings import TargetEmbeddings
from outrider.engine.heads.medusa import Medusa
from outrider.engine.heads.mlp import MlpSpeculator
from outrider.engine.torch_layers.weights import complex_rotations


class HeadGuess(NamedTuple):
    """The guesses of heads at one depth below each root of some texts."""

    logits: Tensor  # [texts, roots, vocabulary]: of the token after the chain
    states: Tensor  # [texts, roots, width]: the heads' states; EAGLE-1 trains them to resemble the target's features


class UnrolledHeads(nn.Module):
    """Heads that guess along texts. The target's embeddings are not part of the module's parameters."""

    def __init__(self, network: Network, shape: HeadsConfig, embeddings: TargetEmbeddings) -> None:
        super().__init__()
        self.network = network
        self.shape = shape
        self._embeddings = embeddings

    def forward(self, tokens: Tensor, features: Tensor) -> list[HeadGuess]:
        """Return the guesses at each depth d, below the roots of rows 0 .. tokens - 2 - d; later roots have no text.

        `tokens`: [texts, tokens] ids; `features`: [texts, tokens, width * parts], from the layers in the shape.
        """
        depth = self.shape.depth
        match self.network:
            case Medusa():
                return [*_medusa(self.network, self._embeddings, features[:, :-1], depth)]
            case MlpSpeculator():
                return [*_mlp(self.network, self._embeddings, tokens, features[:, :-1], depth)]
            case _:
                return [*_eagle(self.network, self.shape, self._embeddings, tokens, features, depth)]


def _medusa(network: Medusa, embeddings: TargetEmbeddings, features: Tensor, depth: int) -> Iterator[HeadGuess]:
    logits = network(features, embeddings.unembed)
    for level in range(depth):
        roots = features.shape[1] - level
        yield HeadGuess(logits[:, :roots, level], features[:, :roots])


def _mlp(
    network: MlpSpeculator, embeddings: TargetEmbeddings, tokens: Tensor, state: Tensor, depth: int
) -> Iterator[HeadGuess]:
    embedded = embeddings.embed(tokens[:, 1:])
    for level in range(depth):
        roots = embedded.shape[1] - level
        state = network(level, state[:, :roots], embedded[:, level:])
        yield HeadGuess(network.logits(state, embeddings.unembed), state)


def _eagle(
    network: Eagle | Eagle3,
    shape: HeadsConfig,
    embeddings: TargetEmbeddings,
    tokens: Tensor,
    features: Tensor,
    depth: int,
) -> Iterator[HeadGuess]:
    embedded = embeddings.embed(
        tokens[:, 1:]
    )  # row i: of token i + 1, which is read together with the feature of token i
    turns = complex_rotations(Rope(shape.theta, None), embedded.shape[1], shape.head_dim).to(features.device)
    state = network.enter(features[:, :-1])
    chain = _Chain()
    for level in range(depth):
        roots = embedded.shape[1] - level
        state = network(embedded[:, level:], state[:, :roots], turns[level:], chain.attend)
        chain.level += 1
        yield HeadGuess(network.logits(state, embeddings.unembed), state)


class _Chain:
    """Attention of a chain below each root (EAGLE-3's training-time test, arXiv 2503.01840, section 3.2).

    A row attends to the text up to the root, whose rows come from true features, to the rows of the chain so far, and
    to itself.
    """

    def __init__(self) -> None:
        self.level = 0
        self._keys: list[Tensor] = []  # of each level so far: [texts, roots, kv_heads, dim]
        self._values: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `Attend`. Row i belongs to the chain whose root is that of row i."""
        self._keys.append(key)
        self._values.append(value)
        if not self.level:
            return attend_causally(query, key, value)
        roots, group = query.shape[1], query.shape[2] // key.shape[2]
        query = (
            query.reshape(*key.shape[:3], group, -1) * query.shape[-1] ** -0.5
        )  # [texts, roots, kv_heads, group, dim]
        first, text = self._keys[0][:, :roots], self._values[0][:, :roots]
        seen = torch.ones(roots, roots, dtype=torch.bool, device=query.device).tril()
        scores = torch.einsum("trkgd,tskd->tkgrs", query, first).masked_fill(~seen, -torch.inf)
        along = [torch.einsum("trkgd,trkd->tkgr", query, level[:, :roots]) for level in self._keys[1:]]
        weights = torch.cat([scores, torch.stack(along, -1)], -1).float().softmax(-1).to(value.dtype)
        attended = torch.einsum("tkgrs,tskd->trkgd", weights[..., :roots], text)
        for weight, level in zip(weights[..., roots:].unbind(-1), self._values[1:], strict=True):
            attended = attended + torch.einsum("tkgr,trkd->trkgd", weight, level[:, :roots])
        return attended.flatten(2)
