"""Low-rank adapters in a device's memory, where kernels find them by their addresses.

An adapter is one piece of memory: its *entries* first, for each layer and module the address of A, that of B and the
rank, then these weights. So the address of that memory is all that a pass has to be given.

Memory belongs to the stream of the passes, torch's current one, which is the device's default stream in all threads.
An adapter may be dropped while a pass that reads it still runs: what that stream does next with the memory comes after
the pass, and the copy of another adapter, which has a stream of its own, waits for the passes first. So nobody has to
keep an adapter until a pass has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.adapters.low_rank import MODULES, LowRankAdapter, linear_shape
from outrider.engine.checkpoints.checkpoint import ModelConfig

ENTRY = 3  # numbers of an entry, int64: addresses of A and B, and the rank; 0: the module is not adapted
_ALIGNMENT = 128  # bytes


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """What an adapter and a pass must agree on."""

    layers: int
    shapes: tuple[tuple[int, int], ...]  # outputs and inputs of each of `MODULES`
    dtype: torch.dtype  # float32 or bfloat16
    device: torch.device

    @classmethod
    def of(cls, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> AdapterForm:
        """Return the form for a model, or for a rank's part of it."""
        return cls(config.layers, tuple(linear_shape(config, module) for module in MODULES), dtype, device)

    def bytes_of(self, rank: int) -> int:
        """Return the bytes of an adapter of all modules."""
        return self.layers * rank * self.dtype.itemsize * sum(map(sum, self.shapes))


@dataclass(frozen=True, slots=True, eq=False)
class DeviceAdapter:
    """An adapter on a device: the handle that segments have."""

    form: AdapterForm
    memory: Tensor  # uint8: its entries, [layers, modules, ENTRY] int64, A and B

    @property
    def address(self) -> int:
        """Where its memory is."""
        return self.memory.data_ptr()


def place_adapter(adapter: LowRankAdapter, kept: Sequence[int], form: AdapterForm) -> DeviceAdapter:
    """Copy an adapter's `kept` layers to the device. It is there when this returns. May be called while passes run.

    A lies as [rank, inputs], B as [rank, outputs]. Raises torch.OutOfMemoryError.
    """
    entries = np.zeros((form.layers, len(MODULES), ENTRY), np.int64)
    weights: list[tuple[int, Tensor]] = []  # with their offsets
    size = _aligned(entries.nbytes)
    for index, layer in enumerate(kept):
        updates = adapter.layers.get(layer, {})
        for module, name in enumerate(MODULES):
            if name not in updates:
                continue
            a, b = updates[name]
            for column, values in enumerate((a, b.T)):
                stored = torch.from_numpy(np.ascontiguousarray(values)).to(form.dtype)
                assert stored.shape[1] == form.shapes[module][1 - column]
                weights.append((size, stored))
                entries[index, module, column] = size
                size = _aligned(size + stored.nbytes)
            entries[index, module, 2] = len(a)
    memory = torch.empty(size, dtype=torch.uint8, device=form.device)
    entries[..., :2] += np.where(entries[..., 2:], memory.data_ptr(), 0)
    host = torch.zeros(size, dtype=torch.uint8)
    for start, stored in ((0, torch.from_numpy(entries)), *weights):
        host[start : start + stored.nbytes] = stored.view(torch.uint8).flatten()
    _copy(host, memory)
    return DeviceAdapter(form, memory)


def _copy(host: Tensor, memory: Tensor) -> None:
    """Copy, and wait until the copy has ended. On a GPU passes that begin meanwhile do not wait for it."""
    if memory.device.type != "cuda":
        memory.copy_(host)
        return
    stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(memory.device))  # a pass may still read what this memory held
    with torch.cuda.stream(stream):
        memory.copy_(host)
    stream.synchronize()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
