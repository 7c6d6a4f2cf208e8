"""Passes with adapters for the kernels, and the comparison with what they should add, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.engine.adapters.low_rank import MODULES, LowRankAdapter, LowRankUpdate
from outrider.engine.gpu.adapters.adapter_memory import AdapterForm, DeviceAdapter, place_adapter
from outrider.engine.gpu.adapters.low_rank import (
    TILE_COLUMNS,
    AdapterInputs,
    AdapterPlan,
    LinearName,
    adapted_linears,
    add_low_rank,
    add_low_rank_by_address,
    lay_adapter_tiles,
)
from outrider.engine.interface.batch import Segment

LAYERS, KEPT = 3, (0, 2)
QUERIES, KEYS, WIDTH, FFN = 96, 40, 72, 150
SHAPES = ((QUERIES, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH), (WIDTH, QUERIES), (FFN, WIDTH), (FFN, WIDTH), (WIDTH, FFN))
WIDE = ((150, 2100), (70, 2100), (70, 2100), (99, 150), (70, 2100), (70, 2100), (99, 1100))
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8}
MARK = 7.0  # in rows of padding


class Case(NamedTuple):
    """A pass over some segments."""

    counts: tuple[int, ...]  # rows of each segment
    adapters: tuple[int | None, ...]  # of each segment
    ranks: tuple[tuple[int, ...], ...]  # of each adapter, by module; 0: not adapted
    rows: int  # with padding
    linear: LinearName
    dtype: str = "float32"
    shapes: tuple[tuple[int, int], ...] = SHAPES
    by_address: bool = False  # by operations of torch


class Outcome(NamedTuple):
    """How a pass compares with what it should be."""

    error: float  # the largest difference, in units of what rounding explains
    untouched: bool  # whether rows without an adapter are as they were
    tiles: int


def random_adapter(ranks: Sequence[int], shapes: Sequence[tuple[int, int]], seed: int) -> LowRankAdapter:
    random = np.random.default_rng(seed)

    def update(module: int) -> LowRankUpdate:
        (outputs, inputs), rank = shapes[module], ranks[module]
        a, b = random.standard_normal((rank, inputs), np.float32), random.standard_normal((outputs, rank), np.float32)
        return LowRankUpdate(a, b)

    layers = {
        layer: {name: update(module) for module, name in enumerate(MODULES) if ranks[module]} for layer in range(LAYERS)
    }
    return LowRankAdapter(layers, max(ranks), f"{seed}")


def compare(case: Case, device: str) -> Outcome:
    """Add adapters to a random result, and compare with the definition."""
    dtype = getattr(torch, case.dtype)
    form = AdapterForm(len(KEPT), case.shapes, dtype, torch.device(device))
    read = [random_adapter(ranks, case.shapes, seed) for seed, ranks in enumerate(case.ranks)]
    handles = [place_adapter(it, KEPT, form) for it in read]
    segments = segments_of(case.counts, [None if which is None else handles[which] for which in case.adapters])
    plan = AdapterPlan.of(case.rows, adapters=max(1, len(segments)), dtype=dtype)
    it = adapted_linears(form)[case.linear]
    tiles = np.full((plan.capacity, TILE_COLUMNS), 12345, np.int64)
    order = np.full(case.rows, -1, np.int32)
    count = lay_adapter_tiles(segments, plan.tile_rows, order, tiles)
    random = np.random.default_rng(99)
    x, before = (
        torch.from_numpy(random.standard_normal((case.rows, size), np.float32)).to(dtype)
        for size in (it.inputs, it.width)
    )
    used = sum(case.counts)
    x[used:] = torch.nan
    before[used:] = MARK
    result = before.clone().to(device)
    inputs = AdapterInputs(torch.from_numpy(order).to(device), torch.from_numpy(tiles).to(device))
    sums = torch.full((plan.sums([it]),), torch.nan, device=device)
    add = add_low_rank_by_address if case.by_address else add_low_rank
    add(x.to(device), result, inputs, 1, it, plan=plan, sums=sums)
    found = result.cpu()

    expected, size = before.double(), before.double().abs()
    first = 0
    for own, which in zip(case.counts, case.adapters, strict=True):
        rows = slice(first, first + own)
        first += own
        start = 0
        for module in range(it.first, it.first + it.modules):
            outputs = case.shapes[module][0]
            place = slice(start, start + outputs)
            start += outputs
            name = [*MODULES][module]
            if which is not None and case.ranks[which][module]:
                a, b = (torch.from_numpy(part).to(dtype).double() for part in read[which].layers[KEPT[1]][name])
                expected[rows, place] += x[rows].double() @ a.t() @ b.t()
                size[rows, place] += x[rows].double().abs() @ a.t().abs() @ b.t().abs()
    apart = (found.double() - expected).abs() / (size * ROUNDING[dtype])
    plain = [row for own, which in zip(case.counts, case.adapters, strict=True) for row in [which is None] * own]
    alone = torch.tensor([*plain, *[True] * (case.rows - used)])
    return Outcome(float(apart[:used].nan_to_num(torch.inf).max()), torch.equal(found[alone], before[alone]), count)


def segments_of(counts: Sequence[int], adapters: Sequence[DeviceAdapter | None]) -> list[Segment]:
    """Segments of which only the number of rows and the adapter matter."""
    return [
        Segment(slot, 0, np.zeros(count, np.int64), np.arange(count), None, None, adapter)
        for slot, (count, adapter) in enumerate(zip(counts, adapters, strict=True))
    ]


def alone_and_together(dtype: str, device: str) -> bool:
    """Return whether rows have the same bits in passes of as many rows, in which others have other adapters or none."""
    kind = getattr(torch, dtype)
    form = AdapterForm(LAYERS, SHAPES, kind, torch.device(device))
    ours, other = (place_adapter(random_adapter([rank] * 7, SHAPES, rank), range(LAYERS), form) for rank in (16, 5))
    plan = AdapterPlan.of(32, adapters=8, dtype=kind)
    it = adapted_linears(form)["qkv"]
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((32, WIDTH), np.float32)).to(kind).to(device)
    found: list[Tensor] = []
    for adapters in ([None, None, ours], [other, None, ours], [None, other, ours]):
        order, tiles = np.zeros(32, np.int32), np.zeros((plan.capacity, TILE_COLUMNS), np.int64)
        lay_adapter_tiles(segments_of([10, 9, 4], adapters), plan.tile_rows, order, tiles)
        inputs = AdapterInputs(torch.from_numpy(order).to(device), torch.from_numpy(tiles).to(device))
        result = torch.zeros(32, it.width, dtype=kind, device=device)
        add_low_rank(x, result, inputs, 0, it, plan=plan, sums=torch.zeros(plan.sums([it]), device=device))
        found.append(result[19:23].cpu())
    return bool(found[0].any()) and all(torch.equal(found[0], others) for others in found[1:])


def run(name: str, *arguments: Any) -> Any:
    """Run one of these functions in the process that interprets kernels."""
    with torch.inference_mode():
        return globals()[name](*arguments)
