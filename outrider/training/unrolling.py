"""What heads guess along a text, at every depth below every root at once: to train them, and to measure them.

The root of row i is the text's token i + 1: the target has read up to i, whose feature is known, and the root is what
it said there. The guess at depth d is the token i + 2 + d, of a chain that has gone along the text so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outrider.engine.heads.eagle import Eagle, Eagle3, attend_causally
from outrider.engine.heads.ends import Ends
from outrider.engine.heads.folder import Network
from outrider.engine.heads.medusa import Medusa
from outrider.engine.heads.mlp import MlpSpeculator
from outrider.engine.heads.shape import Shape
from outrider.engine.rope import Rope
from outrider.engine.weights import complex_turns


class Guess(NamedTuple):
    """What heads say at one depth below each root of some texts."""

    logits: Tensor  # [texts, roots, vocabulary]: of the token behind the chain
    states: Tensor  # [texts, roots, width]: their own, which EAGLE-1 has resemble features


class Unrolled(nn.Module):
    """Heads that guess along texts. What is the target's is no part of it."""

    def __init__(self, network: Network, shape: Shape, ends: Ends) -> None:
        super().__init__()
        self.network = network
        self.shape = shape
        self._ends = ends

    def forward(self, tokens: Tensor, features: Tensor) -> list[Guess]:
        """The guesses at each depth d, below the roots of rows 0 .. tokens - 2 - d: the others have no text there.

        `tokens`: [texts, tokens] ids; `features`: [texts, tokens, width * parts], as the shape says.
        """
        depth = self.shape.depth
        match self.network:
            case Medusa():
                return [*_medusa(self.network, self._ends, features[:, :-1], depth)]
            case MlpSpeculator():
                return [*_mlp(self.network, self._ends, tokens, features[:, :-1], depth)]
            case _:
                return [*_eagle(self.network, self.shape, self._ends, tokens, features, depth)]


def _medusa(network: Medusa, ends: Ends, features: Tensor, depth: int) -> Iterator[Guess]:
    logits = network(features, ends.unembed)
    for level in range(depth):
        roots = features.shape[1] - level
        yield Guess(logits[:, :roots, level], features[:, :roots])


def _mlp(network: MlpSpeculator, ends: Ends, tokens: Tensor, state: Tensor, depth: int) -> Iterator[Guess]:
    embedded = ends.embed(tokens[:, 1:])
    for level in range(depth):
        roots = embedded.shape[1] - level
        state = network(level, state[:, :roots], embedded[:, level:])
        yield Guess(network.logits(state, ends.unembed), state)


def _eagle(
    network: Eagle | Eagle3, shape: Shape, ends: Ends, tokens: Tensor, features: Tensor, depth: int
) -> Iterator[Guess]:
    embedded = ends.embed(tokens[:, 1:])  # row i: of the token i + 1, which is seen with the feature of i
    turns = complex_turns(Rope(shape.theta, None), embedded.shape[1], shape.head_dim).to(features.device)
    state = network.enter(features[:, :-1])
    chain = _Chain()
    for level in range(depth):
        roots = embedded.shape[1] - level
        state = network(embedded[:, level:], state[:, :roots], turns[level:], chain.attend)
        chain.level += 1
        yield Guess(network.logits(state, ends.unembed), state)


class _Chain:
    """Attention of a chain below each root: to the text up to the root, whose rows are from true features, to the rows
    of the chain so far, and to itself (EAGLE-3's training-time test, arXiv 2503.01840, section 3.2)."""

    def __init__(self) -> None:
        self.level = 0
        self._keys: list[Tensor] = []  # of each level so far: [texts, roots, kv_heads, dim]
        self._values: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `Attend` says. Row i is that of the chain whose root is row i's."""
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
