"""The functions that a pass consists of beside its products: the interface of their two implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from outrider.engine.gpu.adapters.low_rank import AdaptedLinear, AdapterInputs, AdapterPlan
    from outrider.engine.gpu.attention.tree_attention import AttentionBuffers, AttentionPlan


class LayerForm(NamedTuple):
    """The sizes of all layers, of one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float


class Kernels(Protocol):
    """The functions of a pass. No shape depends on a value, and the host reads nothing."""

    def norm(
        self, hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, delta: Tensor | None = None
    ) -> Tensor:
        """Add `delta` to the residual stream in place, if there is one, and return its RMS norm (arXiv 1910.07467).

        `hidden`, `delta`: [rows, width], the first float32; `weight`: [width] float32. The norm: [rows, width].
        """

    def rotate(
        self,
        new: Tensor,
        form: LayerForm,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        cache: Tensor,
        places: Tensor,
        norms: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Rotate queries and keys by RoPE, write keys and values to a layer's cache, return the queries.

        `new`: [rows, (heads + 2 * kv_heads) * dim], the queries first; `cos`, `sin`: [positions, dim / 2] float32;
        `cache`: [2, pages, kv_heads, PAGE_ROWS, dim]; `places`: [rows] int64, see `PageTable`. `norms`: weights [dim]
        of the norms of each query and key, where a model has them. Return [rows, heads, dim].
        """

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        tiles: Tensor,
        trees: Tensor,
        pages: Tensor,
        *,
        plan: AttentionPlan,
        buffers: AttentionBuffers,
    ) -> Tensor:
        """Compute the attention of all rows; see `tree_attention`."""

    def add_low_rank(
        self,
        x: Tensor,
        result: Tensor,
        inputs: AdapterInputs,
        layer: int,
        it: AdaptedLinear,
        *,
        plan: AdapterPlan,
        sums: Tensor,
    ) -> None:
        """Add what the adapters of a pass change in one linear to its result; see `low_rank`."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up: [rows, 2 * ffn] -> [rows, ffn]."""

    def head(self, hidden: Tensor, weight: Tensor, eps: float, rows: Tensor) -> Tensor:
        """Return the logits of the norm of [rows, width] float32, as one or two parts to add: [parts * rows, ids].

        `weight`: [width] of the norm; `rows`: [ids, width], the head.
        """

    def choose(
        self,
        parts: Tensor,
        logits: Tensor,
        keys: Tensor,
        temperatures: Tensor,
        unpadded: int,
        choices: Tensor | None,
    ) -> None:
        """Add the parts of the logits, and choose the best tokens of each row under shared noise.

        `parts`: [parts * rows, at least vocabulary] float32; `logits`: [rows, vocabulary] float32, of which ids from
        `unpadded` on become -inf; `keys`: [rows] int64; `temperatures`: [rows] float64, at 0 scores are logits.
        `choices`: [rows, 2 * candidates] float64: the tokens, best first, then their scores log p + g up to a constant;
        None: nothing is chosen. The lowest id wins a tie.
        """

    def move(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy the row at sources[i] to targets[i] in all layers; all are read before one is written. No place is the
        target of two moves, but for those to themselves.

        `cache`: [layers, 2, pages, kv_heads, PAGE_ROWS, dim]; `sources`, `targets`: [moves] int64, places.
        """
