"""Loads a checkpoint's tensors and adapters, or a rank's parts of them, into the compiled model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.engine.adapters.low_rank import (
    JOINED,
    AdapterFiles,
    AdapterLoader,
    LowRankAdapter,
    most_bytes,
    parse_adapter,
)
from outrider.engine.checkpoints.block_types import IN_BLOCKS
from outrider.engine.checkpoints.checkpoint import ModelConfig, Weights
from outrider.engine.checkpoints.stored_tensors import ALL, as_float32
from outrider.engine.tensor_parallel.sharding import Shard, WeightPart, tensor_shapes
from outrider.errors import CheckpointError

if TYPE_CHECKING:
    from outrider._native import Adapter, Model, Weight

OF_RULE = ("convolution", "decay_rates", "decay_biases", "state_norm")  # small weights of the gated delta rule
_MOST = max(map(len, JOINED.values()))  # weights of a linear


def check_layers(source: Weights, config: ModelConfig, kept: Sequence[int]) -> int:
    """Return the number of parameters of the `kept` layers, embedding, last norm and head, on all ranks.

    Raises CheckpointError for a tensor that is missing or has another shape, before memory of that shape is allocated.
    """
    shapes = tensor_shapes(config, kept)
    for name, shape in shapes.items():
        source.check(name, *shape)
    return sum(map(math.prod, shapes.values()))


def load_layers(
    model: Model, source: Weights, config: ModelConfig, shard: Shard, kept: Sequence[int], *, stored: bool = False
) -> None:
    """Load the `kept` layers, embedding, last norm and head into a model; bfloat16 as its bits.

    `config`: that of the complete model. `stored`: quantized weights stay in their blocks. Raises CheckpointError.
    """

    def in_blocks(it: WeightPart) -> bool:
        return stored and source.kind(it.name) in IN_BLOCKS

    def take(it: WeightPart, files: ExitStack, rows: int = 0) -> Weight:
        """Return where a file has a weight, until `files` are closed; or an array, with zeros below the weight where it
        has fewer than `rows`.
        """
        kind, blocks = source.kind(it.name), in_blocks(it)
        complete = len(range(it.shape[0])[it.rows]) >= rows and range(it.shape[-1])[it.columns] == range(it.shape[-1])
        if complete and (blocks or kind not in IN_BLOCKS):
            lies = files.enter_context(source.in_file(it.name, *it.shape, rows=it.rows))
            if lies is not None:
                return kind, lies
        read = source.blocks if blocks else source.array
        found = read(it.name, *it.shape, rows=it.rows, columns=it.columns)
        if rows > len(found):
            found = np.pad(found, ((0, rows - len(found)), (0, 0)))
        found = np.ascontiguousarray(found)
        if not blocks:
            return found
        order = source.order(it.name)
        return (kind, found) if order is None else (kind, found, order)

    def norm(it: WeightPart) -> NDArray[np.float32]:
        return as_float32(source.array(it.name, *it.shape)) + np.float32(config.parts.norm_offset)

    def of_rule(what: str, it: WeightPart) -> NDArray[np.float32]:
        found = as_float32(source.array(it.name, *it.shape))
        if what == "decay_rates" and config.parts.delta is not None and config.parts.delta.logged:
            return -np.exp(found)
        return np.ascontiguousarray(found.reshape(it.shape[0], -1)) if len(it.shape) > 1 else found

    def weight(what: str, it: WeightPart, files: ExitStack) -> Weight:
        if what in OF_RULE:
            return of_rule(what, it)
        return norm(it) if what.endswith("norm") else take(it, files)

    for index, layer in enumerate(kept):
        parts = shard.layer(config, layer)
        _check_orders(source, parts)
        with ExitStack() as files:
            model.set_layer(index, {what: weight(what, it, files) for what, it in parts.items()})
        for number, expert in enumerate(shard.experts(config, layer)):
            with ExitStack() as files:
                model.set_expert(index, number, *(take(part, files) for part in expert))
    ends = shard.ends(config)
    rows = ends["embedding"]
    if in_blocks(rows):
        rows = rows._replace(columns=ALL)  # blocks may not end where a rank's columns do
    with ExitStack() as files:
        embedding = None if config.tied and shard.of == 1 else take(rows, files)  # None: that of the head
        head = take(ends["head"], files, -(-config.head_rows // shard.of))
        model.set_ends(embedding, norm(ends["norm"]) * np.float32(config.parts.logit_scale), head, config.draft_ids)


def _check_orders(source: Weights, parts: Mapping[str, WeightPart]) -> None:
    """Raise CheckpointError where weights of one product have their inputs in different orders."""
    for joined in (("query", "key", "value"), ("gate", "up"), ("inputs", "gates")):
        names = [parts[what].name for what in joined if what in parts]
        if len(names) < len(joined):  # the layer has other parts
            continue
        first, *others = [source.order(name) for name in names]
        for name, other in zip(names[1:], others, strict=True):
            if not np.array_equal(first, other) if first is not None and other is not None else first is not other:
                raise CheckpointError(
                    f"{source.files[name]}: {names[0]} and {name} have their inputs in different orders (desc_act); "
                    "take a checkpoint without, or one whose weights of one layer have a common order"
                )


class CpuAdapters(AdapterLoader):
    """Packs the adapters of a compiled engine. It needs no model, so that one can be packed while passes run."""

    def __init__(self, config: ModelConfig, shard: Shard, kept: Sequence[int], dtype: str) -> None:
        """`config`: that of the complete model; `dtype`: float32 or bfloat16."""
        self.most_bytes = most_bytes(config)
        self._config = config
        self._shard = shard
        self._kept = kept
        self._dtype = dtype

    def pack(self, files: AdapterFiles) -> tuple[Adapter, LowRankAdapter]:
        from outrider._native import Adapter

        read = parse_adapter(files, self._config)
        own, it = self._shard.adapter(read, self._config), self._shard.config(self._config)
        queries, keys = it.heads * it.head_dim, it.kv_heads * it.head_dim
        packed = Adapter(self._dtype, it.width, queries, keys, it.ffn, len(self._kept))
        for index, layer in enumerate(self._kept):
            updates = own.layers.get(layer, {})
            for part, modules in enumerate(JOINED.values()):  # the engine has linears by number, in this order
                found = [updates.get(name, (None, None)) for name in modules]
                if updates.keys() & {*modules}:
                    missing = [None] * 2 * (_MOST - len(modules))
                    packed.set(index, part, *[one for pair in found for one in pair], *missing)
        return packed, read
