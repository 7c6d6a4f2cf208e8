"""Low-rank adapters on torch: B A x is added to what each linear gives for the rows of a pass that have one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.adapters.low_rank import JOINED, LinearName, LowRankAdapter, LowRankUpdate, linear_shape
from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Dtype
from outrider.engine.torch_layers.linear import Linear, float_linear
from outrider.engine.torch_layers.packing import Packed, padded_size, rows_of
from outrider.engine.torch_layers.weights import group_first, interleave


class _Update(NamedTuple):
    """What is added to a linear of the engine, which joins several weights of the checkpoint."""

    shrink: Linear  # A of all weights, one behind the other: [rows, inputs] -> [rows, ranks]
    expand: Linear  # B of all weights, one block for each: [rows, ranks] -> [rows, outputs]


@dataclass(frozen=True, slots=True, eq=False)
class EagerAdapter:
    """An adapter of an engine on torch."""

    layers: tuple[Mapping[LinearName, _Update], ...]
    config: ModelConfig  # the shape of the engine's part of the model
    dtype: Dtype  # of the engine


def check_adapter(adapter: object, config: ModelConfig, dtype: Dtype) -> None:
    """Raise ValueError for what is no adapter of an engine of that shape and type."""
    if not isinstance(adapter, EagerAdapter) or (adapter.config, adapter.dtype) != (config, dtype):
        raise ValueError(f"an adapter of another model or engine: {adapter!r:.80}")


def pack_adapter(adapter: LowRankAdapter, config: ModelConfig, kept: Sequence[int], dtype: Dtype) -> EagerAdapter:
    """Return the adapter for an engine that has the `kept` layers of a model: float32 for such a one, else bfloat16.

    `config`: the shape of the engine's part, to which the adapter belongs.
    """
    with torch.inference_mode():
        layers = tuple(_packed_layer(adapter.layers.get(layer, {}), config, dtype) for layer in kept)
    return EagerAdapter(layers, config, dtype)


def _packed_layer(updates: Mapping[str, LowRankUpdate], config: ModelConfig, dtype: Dtype) -> dict[LinearName, _Update]:
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    packed: dict[LinearName, _Update] = {}
    for linear, modules in JOINED.items():
        if not updates.keys() & {*modules}:
            continue
        parts = [_ordered(updates.get(module), module, config) for module in modules]
        a, b = torch.cat([a for a, _ in parts]), torch.block_diag(*(b for _, b in parts))  # type: ignore[no-untyped-call]
        packed[linear] = _Update(float_linear(a, None, kind), float_linear(b, None, kind))
    return packed


def _ordered(update: LowRankUpdate | None, module: str, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return A and B of a weight in the order of heads and dimensions of `EagerLayer`; of rank 0 for no update."""
    outputs, inputs = linear_shape(config, module)
    if update is None:
        return torch.empty(0, inputs), torch.empty(outputs, 0)
    a, b = torch.from_numpy(update.a), torch.from_numpy(update.b)
    match module:
        case "q_proj":
            b = group_first(interleave(b, config.head_dim), config)
        case "k_proj":
            b = interleave(b, config.head_dim)
        case "o_proj":
            a = group_first(a.T, config).T
    return a, b


class _AdaptedRows(NamedTuple):
    """Rows that have the same adapter."""

    adapter: EagerAdapter
    rows: Tensor  # [n] int64
    padded: Tensor  # [n or more] int64: the last one repeated, up to a number of rows whose bits do not depend on it


class PassAdapters:
    """The adapters of one pass, and which of its rows have them."""

    def __init__(self, segments: Sequence[Segment], packed: Packed) -> None:
        self._rows: Sequence[_AdaptedRows] = ()
        self._outputs: Sequence[_AdaptedRows] = ()
        if any(segment.adapter is not None for segment in segments):
            rows, outputs = rows_of(packed, segments).numpy(), np.arange(packed.outputs_used)
            self._rows = _by_adapter(segments, rows, [len(it.tokens) for it in segments])
            self._outputs = _by_adapter(segments, outputs, [it.outputs for it in segments])

    def keep_outputs(self) -> None:
        """Take the rows of linears, from now on, for those that want logits."""
        self._rows = self._outputs

    def apply(self, linear: Linear, layer: int, name: LinearName, x: Tensor) -> Tensor:
        """Return what a linear of a layer gives for rows x, with what their adapters add."""
        y = linear(x)
        for adapter, rows, padded in self._rows:
            update = adapter.layers[layer].get(name)
            if update is not None:
                added = update.expand(update.shrink(x.index_select(0, padded)))
                y.index_add_(0, rows, added[: len(rows)].to(y.dtype))
        return y


def _by_adapter(segments: Sequence[Segment], rows: NDArray[np.int64], counts: Sequence[int]) -> list[_AdaptedRows]:
    """Group rows by their adapters. `counts`: how many of the rows each segment has, in order."""
    found: dict[EagerAdapter, list[NDArray[np.int64]]] = {}
    for segment, own in zip(segments, np.split(rows, np.cumsum(counts)[:-1]), strict=True):
        if isinstance(segment.adapter, EagerAdapter) and len(own):
            found.setdefault(segment.adapter, []).append(own)
    grouped = []
    for adapter, parts in found.items():
        joined = np.concatenate(parts)
        padded = np.pad(joined, (0, padded_size(len(joined)) - len(joined)), mode="edge")
        grouped.append(_AdaptedRows(adapter, torch.from_numpy(joined), torch.from_numpy(padded)))
    return grouped
