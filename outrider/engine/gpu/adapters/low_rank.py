"""What adapters add to the linears of a pass: B A x for each row x that has one (LoRA, arXiv 2106.09685).

A *tile* is a few rows of a pass with the same adapter, which then is read once for all of them. The host lays out the
tiles of each pass (`lay_adapter_tiles`) with the addresses of their adapters; a kernel's program reads its tile on the
device. Shapes and grids, and so a recorded graph, depend on the pass's number of rows alone (`AdapterPlan`).

The kernels need Triton, and are imported when they are first used: with CUDA, or in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from ctypes import c_int64, c_uint8
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.library import Library

from outrider.engine.adapters.low_rank import JOINED, MODULES, MOST_RANK, LinearName
from outrider.engine.gpu.adapters.adapter_memory import ENTRY, AdapterForm, DeviceAdapter
from outrider.engine.interface.batch import Segment

TILE_COLUMNS = 3  # first place in `order`, rows (0: padding), address of the adapter
FEW_ROWS = 64  # of a pass, up to which tiles are small
PROGRAMS = 64  # of a product with A, from which on its inputs are not divided further; not measured
MAX_SPLITS = 16


class AdaptedLinear(NamedTuple):
    """A linear of a layer, which joins the weights of one to three modules."""

    first: int  # of its modules among `MODULES`
    modules: int
    inputs: int
    first_outputs: int  # of its first module
    other_outputs: int  # of each of its others

    @property
    def width(self) -> int:
        """Number of all outputs."""
        return self.first_outputs + (self.modules - 1) * self.other_outputs


def adapted_linears(form: AdapterForm) -> dict[LinearName, AdaptedLinear]:
    """Return the linears that join the modules of a form."""
    names = [*MODULES]
    found: dict[LinearName, AdaptedLinear] = {}
    for name, modules in JOINED.items():
        first = names.index(modules[0])
        (outputs, inputs), (others, _) = form.shapes[first], form.shapes[first + len(modules) - 1]
        found[name] = AdaptedLinear(first, len(modules), inputs, outputs, others)
    return found


class AdapterInputs(NamedTuple):
    """What the kernels read of a pass."""

    order: Tensor  # [rows] int32: rows of the pass, those with the same adapter one behind another
    tiles: Tensor  # [capacity, TILE_COLUMNS] int64, see `lay_adapter_tiles`


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The sizes of the kernels for a number of rows: whatever a recording depends on."""

    rows: int
    capacity: int  # tiles, padding included
    tile_rows: int
    block_r: int  # ranks of a step
    block_k: int  # inputs of a step
    block_n: int  # outputs of a program
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, rows: int, *, adapters: int, dtype: torch.dtype) -> AdapterPlan:
        """Choose the sizes. `rows`: of the pass, with padding; `adapters`: maximum of a pass with any rows."""
        if rows < 1 or adapters < 1 or dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"adapters: {rows} rows with {adapters} of them in {dtype}")
        exact = dtype == torch.float32  # without tensor cores: small blocks, whose operands fit the registers
        wide = rows > FEW_ROWS and not exact
        tile_rows = 64 if wide else 16
        return cls(
            rows=rows,
            capacity=min(rows, (rows + min(rows, adapters) * (tile_rows - 1)) // tile_rows),
            tile_rows=tile_rows,
            block_r=64 if wide else 16,
            block_k=64 if wide or exact else 256,
            block_n=64 if wide or exact else 128,
            num_warps=4,
            num_stages=3,
        )

    def splits(self, inputs: int) -> int:
        """Return how many programs share the inputs of a linear: a power of two."""
        programs, splits = -(-self.rows // self.tile_rows), 1
        while splits < MAX_SPLITS and 2 * splits * self.block_k <= inputs and splits * programs < PROGRAMS:
            splits *= 2
        return splits

    def part(self, inputs: int) -> int:
        """Return the inputs of each of these programs: a multiple of `block_k`."""
        return -(-inputs // (self.block_k * self.splits(inputs))) * self.block_k

    def sums(self, linears: Iterable[AdaptedLinear]) -> int:
        """Return how many float32 numbers lie between the two kernels, at most."""
        return max(self.splits(it.inputs) * self.rows * it.modules * MOST_RANK for it in linears)

    @property
    def constants(self) -> dict[str, Any]:
        """What both kernels are compiled for."""
        return {
            "COLUMNS": TILE_COLUMNS,
            "ENTRY": ENTRY,
            "MOST_RANK": MOST_RANK,
            "TILE_ROWS": self.tile_rows,
            "BLOCK_R": self.block_r,
        }


def add_low_rank(
    x: Tensor,
    result: Tensor,
    inputs: AdapterInputs,
    layer: int,
    it: AdaptedLinear,
    *,
    plan: AdapterPlan,
    sums: Tensor,
) -> None:
    """Add what the adapters of a pass change in one linear to its result, in place; rows without one stay as they are.

    `x`: [rows, inputs], `result`: [rows, outputs], both contiguous and of the adapters' type; `sums`: float32, at least
    `AdapterPlan.sums`, which calls overwrite. The host reads nothing.

    Products are summed in float32. A x is rounded to the type of B, as PEFT does, and the sum with the result again.
    """
    from outrider.engine.gpu.adapters.low_rank_kernels import expand, shrink

    _check(x, result, inputs, it, plan)
    entry, splits = layer * len(MODULES) + it.first, plan.splits(it.inputs)
    assert sums.numel() >= splits * plan.rows * it.modules * MOST_RANK
    shrink[plan.capacity, it.modules, splits](
        x, inputs.order, inputs.tiles, sums, entry, plan.rows, it.inputs, plan.part(it.inputs),
        **plan.constants, BLOCK_K=plan.block_k, num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
    blocks = -(-max(it.first_outputs, it.other_outputs) // plan.block_n)
    expand[plan.capacity, blocks, it.modules](
        result, inputs.order, inputs.tiles, sums, entry, plan.rows, it.width, it.first_outputs, it.other_outputs,
        **plan.constants, BLOCK_N=plan.block_n, SPLITS=splits, num_warps=plan.num_warps, num_stages=1,
    )  # fmt: skip


def add_low_rank_by_address(
    x: Tensor,
    result: Tensor,
    inputs: AdapterInputs,
    layer: int,
    it: AdaptedLinear,
    *,
    plan: AdapterPlan,
    sums: Tensor,
) -> None:
    """Compute what `add_low_rank` does on a CPU. It is one operation of torch, which a recorder can repeat."""
    _check(x, result, inputs, it, plan)
    outputs = [it.first_outputs, *[it.other_outputs] * (it.modules - 1)]
    torch.ops.outrider.add_low_rank(x, result, *inputs, layer * len(MODULES) + it.first, outputs)


def _check(x: Tensor, result: Tensor, inputs: AdapterInputs, it: AdaptedLinear, plan: AdapterPlan) -> None:
    assert x.shape == (plan.rows, it.inputs)
    assert result.shape == (plan.rows, it.width)
    assert inputs.order.shape == (plan.rows,)
    assert inputs.tiles.shape == (plan.capacity, TILE_COLUMNS)
    assert x.is_contiguous()
    assert result.is_contiguous()
    assert x.dtype == result.dtype


def _add_on_cpu(x: Tensor, result: Tensor, order: Tensor, tiles: Tensor, entry: int, outputs: Sequence[int]) -> Tensor:
    for first, count, address in tiles.tolist():
        rows = order[first : first + count].long()
        start = 0
        for module, own in enumerate(outputs):
            if count:
                place = address + (entry + module) * ENTRY * np.dtype(np.int64).itemsize
                at_a, at_b, rank = (c_int64 * ENTRY).from_address(place)
                if rank:
                    a, b = _at(at_a, (rank, x.shape[1]), x.dtype), _at(at_b, (rank, own), x.dtype)
                    shrunk = (x[rows].float() @ a.float().t()).to(x.dtype)
                    added = result[rows, start : start + own].float() + shrunk.float() @ b.float()
                    result[rows, start : start + own] = added.to(result.dtype)
            start += own
    return result


def _at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the tensor at an address of this process."""
    memory = (c_uint8 * (prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _registered() -> Library:
    """Make `_add_on_cpu` an operation of torch."""
    library = Library("outrider", "FRAGMENT")  # type: ignore[no-untyped-call]
    terms = "(Tensor x, Tensor(a!) result, Tensor order, Tensor tiles, int entry, int[] outputs) -> Tensor(a!)"
    library.define(f"add_low_rank{terms}")  # type: ignore[no-untyped-call]
    library.impl("add_low_rank", _add_on_cpu, "CPU")  # type: ignore[no-untyped-call]
    library.impl("add_low_rank", lambda x, result, *_: result, "Meta")  # type: ignore[no-untyped-call]
    return library


_LIBRARY = _registered()  # for as long as the operation is to be had


def lay_adapter_tiles(
    segments: Sequence[Segment], tile_rows: int, order: NDArray[np.int32], tiles: NDArray[np.int64]
) -> int:
    """Write the tiles of segments whose rows lie one behind another in the pass. Return how many tiles there are.

    `order`: [rows], of which the places of tiles are written; `tiles`: [capacity, TILE_COLUMNS], all of which is
    written. Raises ValueError when there are too many rows or tiles.
    """
    rows_of: dict[int, list[NDArray[np.int64]]] = {}  # by address
    first = 0
    for it in segments:
        if isinstance(it.adapter, DeviceAdapter):
            rows_of.setdefault(it.adapter.address, []).append(np.arange(first, first + len(it.tokens)))
        first += len(it.tokens)
    laid = [*_tiles(rows_of, tile_rows)]
    if len(laid) > len(tiles) or first > len(order):
        raise ValueError(f"adapters: {len(laid)} tiles of {first} rows, of at most {len(tiles)} and {len(order)}")
    rows = [part for parts in rows_of.values() for part in parts]
    if rows:
        joined = np.concatenate(rows)
        order[: len(joined)] = joined
        tiles[: len(laid)] = laid
    tiles[len(laid) :] = 0
    return len(laid)


def _tiles(rows_of: dict[int, list[NDArray[np.int64]]], tile_rows: int) -> Iterator[tuple[int, int, int]]:
    first = 0
    for address, parts in rows_of.items():
        end = first + sum(map(len, parts))
        for at in range(first, end, tile_rows):
            yield at, min(tile_rows, end - at), address
        first = end
