"""The adapters of an engine on a device: loading them, and giving each pass those of its rows.

A recording holds no adapter: it reads the addresses of a pass's adapters from a buffer that never moves. So adapters
come and go while recordings stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.adapters.low_rank import (
    AdapterFiles,
    AdapterLoader,
    LinearName,
    LowRankAdapter,
    NoAdapters,
    most_bytes,
    parse_adapter,
)
from outrider.engine.checkpoints.checkpoint import ModelConfig
from outrider.engine.gpu.adapters.adapter_memory import AdapterForm, DeviceAdapter, place_adapter
from outrider.engine.gpu.adapters.low_rank import (
    TILE_COLUMNS,
    AdapterInputs,
    AdapterPlan,
    adapted_linears,
    lay_adapter_tiles,
)
from outrider.engine.gpu.kernels import Kernels
from outrider.engine.gpu.passes.packing import ROWS
from outrider.engine.gpu.passes.staging import INTEGER, SMALL, Field, Staging, placed
from outrider.engine.interface.batch import Segment
from outrider.engine.tensor_parallel.sharding import Shard
from outrider.errors import ConfigError

RESERVED_RANK = 16  # of all modules: memory for so large an adapter is kept free for each that the engine may hold


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """What an engine's adapters are like."""

    config: ModelConfig  # of the complete model
    shard: Shard  # the part of the model that the engine computes
    kept: Sequence[int]  # its layers
    form: AdapterForm
    most: int  # adapters that are held, for which memory is reserved

    @property
    def reserved(self) -> int:
        """Bytes that KV leaves to adapters."""
        return self.most * self.form.bytes_of(RESERVED_RANK)


class NoAdapterTable(NoAdapters):
    """The adapters of an engine that was loaded without."""

    form = None
    passes = (False,)  # whether passes have adapters, for each kind of pass that is recorded

    def __init__(self) -> None:
        super().__init__("this engine was loaded without; start the verifier with --adapters")

    def of_rows(self, rows: int, *, adapted: bool) -> PlainPass:
        """Return what passes read: nothing."""
        return PlainPass()


class PlainPass:
    """The adapters of passes that have none."""

    def send(self, segments: Sequence[Segment]) -> None:
        """Do nothing: no kernel reads anything."""

    def add(self, x: Tensor, result: Tensor, layer: int, linear: LinearName) -> None:
        """Do nothing: the result is that of the model as it is."""


class AdaptedPass:
    """The adapters of passes of one number of rows."""

    def __init__(self, table: AdapterTable, plan: AdapterPlan) -> None:
        self._table = table
        self._plan = plan
        self._tiles, self._order = fields = _fields(plan)
        self._inputs = AdapterInputs(*map(table.staging.tensor, reversed(fields)))
        self.send([])

    def send(self, segments: Sequence[Segment]) -> None:
        """Begin to copy which rows have which adapter."""
        staging = self._table.staging
        staging.wait()
        lay_adapter_tiles(segments, self._plan.tile_rows, staging.array(self._order), staging.array(self._tiles))
        staging.copy((0, self._order.stop))

    def add(self, x: Tensor, result: Tensor, layer: int, linear: LinearName) -> None:
        """Add what the adapters change in a linear to its result, in place. `x`: what the linear is computed of."""
        table = self._table
        it = table.linears[linear]
        table.kernels.add_low_rank(x, result, self._inputs, layer, it, plan=self._plan, sums=table.sums)


class AdapterTable(AdapterLoader):
    """The buffers of an engine for adapters, and what loads them."""

    passes = (False, True)  # see `NoAdapterTable`

    def __init__(self, shape: AdapterShape, slots: int, kernels: Kernels) -> None:
        self._shape = shape
        self.most_bytes = most_bytes(shape.config)
        self.form = shape.form
        self.kernels = kernels
        self.linears = adapted_linears(shape.form)
        # Segments of a pass are of different slots, but for a chain and the tree behind it, which have one adapter.
        self._plans = {rows: AdapterPlan.of(rows, adapters=slots, dtype=shape.form.dtype) for rows in ROWS}
        plans = self._plans.values()
        device = shape.form.device
        self.staging = Staging(max(_fields(plan)[-1].stop for plan in plans), device)
        self.sums = torch.zeros(max(plan.sums(self.linears.values()) for plan in plans), device=device)

    def of_rows(self, rows: int, *, adapted: bool) -> PlainPass | AdaptedPass:
        """Return what passes of `rows` rows read."""
        return AdaptedPass(self, self._plans[rows]) if adapted else PlainPass()

    def pack(self, files: AdapterFiles) -> tuple[DeviceAdapter, LowRankAdapter]:
        """Parse an adapter and copy it to the device. Raises CheckpointError; ConfigError where memory is full."""
        shape = self._shape
        read = parse_adapter(files, shape.config)
        try:
            return place_adapter(shape.shard.adapter(read, shape.config), shape.kept, shape.form), read
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"adapters: {self._shape.form.device} has too little memory for {files.folder}, of rank {read.rank}, "
                f"beside those in use; memory is reserved for max_adapters, {self._shape.most}, of rank "
                f"{RESERVED_RANK}: set kv_memory, or lower the slots or max_adapters"
            ) from None


def check_adapters(segments: Sequence[Segment], form: AdapterForm | None) -> None:
    """Raise ValueError for a segment whose adapter does not have this form; None: there are no adapters."""
    for it in segments:
        if it.adapter is not None and not (isinstance(it.adapter, DeviceAdapter) and it.adapter.form == form):
            raise ValueError(f"segment of slot {it.slot}: its adapter is one of another model, or no adapter")


def _fields(plan: AdapterPlan) -> list[Field]:
    """Return the places of the tiles and of the order of rows."""
    kinds: list[tuple[np.dtype[np.int64] | np.dtype[np.int32], tuple[int, ...]]]
    kinds = [(INTEGER, (plan.capacity, TILE_COLUMNS)), (SMALL, (plan.rows,))]
    return list(placed(kinds))
