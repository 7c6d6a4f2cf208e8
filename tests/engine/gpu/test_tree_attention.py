"""Tree attention agrees with its definition, reads nothing that is stale, and fits the processors of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from outrider.engine.gpu.attention.page_table import PAGE_ROWS, pages_of
from outrider.engine.gpu.attention.tree_attention import (
    MAX_SPLITS,
    PROGRAMS,
    TILE_COLUMNS,
    TREE,
    TREE_WORDS,
    AttentionBuffers,
    AttentionPlan,
    lay_tiles,
)
from outrider.engine.interface.batch import Segment
from tests.engine.gpu.interpreter import interpreter
from tests.engine.gpu.kernel_resources import SPILLED, compiled, plans
from tests.engine.gpu.tree_attention_cases import (
    Branches,
    Case,
    Chain,
    Outcome,
    Scattered,
    compare,
    only_padding,
    segment,
)

LENGTHS = (0, 1, 63, 64, 65, 1000)
CLOSE = {"float32": 1e-5, "bfloat16": 0.02}

Run = Callable[..., object]


@pytest.fixture(scope="module")
def on_device() -> Iterator[Callable[..., object]]:
    """Call a function with a device at the end: a GPU, or without one a process that interprets the kernels."""
    if torch.cuda.is_available():
        yield lambda function, *arguments: function(*arguments, "cuda")
    else:
        with interpreter() as pool:
            yield lambda function, *arguments: pool.submit(function, *arguments, "cpu").result()


def check(on_device: Callable[..., object], case: Case) -> Outcome:
    outcome = on_device(compare, case)
    assert isinstance(outcome, Outcome)
    assert outcome.error < CLOSE[case.dtype], outcome  # NaN is not below
    assert outcome.untouched
    assert outcome.repeated
    return outcome


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_sessions_of_all_lengths_share_a_pass(on_device: Run, group: int, dtype: str) -> None:
    parts = tuple(Branches(prefix, 1 + 3 * (index % 2)) for index, prefix in enumerate(LENGTHS))
    check(on_device, Case(parts, rows=17, group=group, dtype=dtype, splits=4, seed=group))


@pytest.mark.parametrize("seed", range(4))
def test_tree_attention_computes_a_tree_of_many_tiles(on_device: Run, seed: int) -> None:
    outcome = check(on_device, Case((Branches(70, 41),), rows=48, group=2, kv_heads=2, splits=1 + seed % 2, seed=seed))
    assert outcome.tiles == 6


def test_a_drafters_rows_see_scattered_keys(on_device: Run) -> None:
    parts = (Scattered(0, 5, 200), Scattered(65, 1, 31), Scattered(64, 8, 32), Scattered(3, 2, 32 * TREE_WORDS))
    check(on_device, Case(parts, rows=16, group=2, splits=2))


@pytest.mark.parametrize("splits", [1, 4])
def test_tree_attention_handles_key_blocks_that_a_row_does_not_see(on_device: Run, splits: int) -> None:
    parts = (Scattered(0, 2, 200, density=0.0), Scattered(0, 3, 180, density=0.01))
    check(on_device, Case(parts, rows=8, splits=splits))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtype", CLOSE)
def test_tree_attention_computes_a_chunk_of_a_prompt(on_device: Run, dtype: str, splits: int) -> None:
    check(on_device, Case((Chain(0, 130), Chain(65, 3)), rows=140, group=2, dtype=dtype, splits=splits))


def test_all_kinds_of_rows_share_a_pass(on_device: Run) -> None:
    parts = (Chain(130, 1), Branches(5, 6), Scattered(64, 3, 70), Chain(1, 20), Branches(129, 1))
    for dtype in CLOSE:
        check(on_device, Case(parts, rows=32, group=3, kv_heads=2, dtype=dtype, splits=1))


@pytest.mark.parametrize("dim", [16, 24, 80, 96, 256])
@pytest.mark.parametrize("dtype", CLOSE)
def test_tree_attention_takes_heads_of_any_size(on_device: Run, dim: int, dtype: str) -> None:
    check(on_device, Case((Branches(70, 5), Chain(64, 1)), rows=8, group=2, dim=dim, dtype=dtype, splits=2))


def test_tree_attention_takes_more_splits_than_keys(on_device: Run) -> None:
    outcome = check(on_device, Case((Chain(0, 1), Branches(2, 2), Branches(300, 1)), rows=4, group=2))
    assert outcome.splits == MAX_SPLITS


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("by", ["segments", "gathering"])
def test_torch_operations_compute_tree_attention_too(
    by: Literal["segments", "gathering"], group: int, dtype: str
) -> None:
    parts = (Chain(130, 1), Branches(5, 6), Scattered(64, 3, 70), Chain(1, 20), Branches(129, 1), Chain(0, 40))
    case = Case(parts, rows=80, group=group, kv_heads=2, dim=24, dtype=dtype, by=by)
    check(lambda function, *arguments: function(*arguments, "cpu"), case)


def test_tree_attention_fills_wide_tiles(on_device: Run) -> None:
    """Of 64 queries, as passes with many rows have them."""
    outcome = check(on_device, Case((Branches(33, 90), Chain(10, 40)), rows=136, group=4, dtype="bfloat16", splits=1))
    assert outcome.tiles == 9


@pytest.mark.parametrize("splits", [1, 4])
def test_a_pass_of_padding_alone_writes_nothing(on_device: Run, splits: int) -> None:
    assert on_device(only_padding, splits)


@pytest.mark.parametrize("seed", range(20))
def test_tiles_and_mask_bits_equal_those_of_the_segments(seed: int) -> None:
    random = np.random.default_rng(seed)
    slots, tile_rows = 12, int(random.integers(1, 17))
    segments: list[Segment] = []
    for slot in random.permutation(slots)[: random.integers(1, slots + 1)].tolist():
        rows, prefix = int(random.integers(1, 40)), int(random.integers(0, 1000))
        kinds = (Chain(prefix, rows), Branches(prefix, rows), Scattered(prefix, rows, rows + int(random.integers(99))))
        segments.append(segment(kinds[random.integers(3)], slot, random))
    used = sum(len(it.tokens) for it in segments)
    rows = used + int(random.integers(0, 9))
    plan = AttentionPlan.of(rows, heads=4, kv_heads=4, dim=16, dtype=torch.float32, segments=slots, text_pages=9)
    capacity = plan.capacity if plan.tile_rows == tile_rows else rows
    tiles = np.full((capacity, TILE_COLUMNS), 99, np.int32)
    trees = np.zeros((rows, TREE_WORDS), np.int32)
    count = lay_tiles(segments, tile_rows, tiles, trees)

    expected, first, page = [], 0, 0
    for it in segments:
        for within in range(0, len(it.tokens), tile_rows):
            size = min(tile_rows, len(it.tokens) - within)
            seen, behind = (it.span, TREE) if it.mask is not None else (within + size, within)
            expected.append([first + within, size, page, it.prefix, seen, behind])
        if it.mask is not None:
            bits = np.unpackbits(trees[first : first + len(it.tokens)].view(np.uint8), axis=1, bitorder="little")
            assert np.array_equal(bits[:, : it.span], it.mask)
        first += len(it.tokens)
        page += -(-(it.prefix + it.span) // PAGE_ROWS)
    assert tiles[:count].tolist() == expected
    assert not tiles[count:].any()


@pytest.mark.parametrize("seed", range(20))
def test_an_attention_plan_has_tiles_for_any_segments_that_fill_its_rows(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, slots, group = int(random.integers(1, 300)), int(random.integers(1, 40)), int(random.integers(1, 20))
    plan = AttentionPlan.of(rows, heads=group, kv_heads=1, dim=64, dtype=torch.bfloat16, segments=slots, text_pages=9)
    assert plan.tile_rows * group <= plan.block_m
    for _ in range(50):
        cuts = np.sort(random.integers(0, rows + 1, random.integers(0, min(rows, slots))))
        counts = np.diff(np.concatenate(([0], cuts, [rows])))
        assert (-(-counts // plan.tile_rows)).sum() <= plan.capacity


@pytest.mark.parametrize("kv_heads", [4, 8])
def test_a_pass_of_one_row_keeps_a_gpu_busy_and_a_wide_one_is_not_split(kv_heads: int) -> None:
    shape = {
        "heads": 4 * kv_heads,
        "kv_heads": kv_heads,
        "dim": 128,
        "dtype": torch.bfloat16,
        "segments": 4,
        "text_pages": 9,
    }
    one, wide = AttentionPlan.of(1, **shape), AttentionPlan.of(2048, **shape)  # type: ignore[arg-type]
    assert PROGRAMS // 2 < one.capacity * kv_heads * one.splits <= PROGRAMS
    assert wide.splits == 1
    assert wide.block_m == 64


def test_buffers_serve_all_plans() -> None:
    shape = {"heads": 8, "kv_heads": 2, "dim": 32, "dtype": torch.bfloat16, "segments": 4, "text_pages": 9}
    made = [AttentionPlan.of(rows, **shape) for rows in (1, 8, 64, 512)]  # type: ignore[arg-type]
    buffers = AttentionBuffers.of(made, torch.device("cpu"))
    assert buffers.result.shape == (512, 8, 32)
    assert not buffers.result.any()
    for plan in made:
        if plan.splits > 1:
            assert len(buffers.totals) >= plan.rows * plan.heads * plan.splits
            assert len(buffers.accumulators) >= plan.rows * plan.heads * plan.splits * plan.dim


def test_a_long_text_does_not_make_short_ones_read_more() -> None:
    """31 texts of a thousand tokens and one of 64,000: the keys of their blocks, and the rows of their pages."""
    lengths = [1000] * 31 + [64_000]
    segments = [segment(Chain(length, 1), slot, np.random.default_rng(0)) for slot, length in enumerate(lengths)]
    plan = AttentionPlan.of(
        32, heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, segments=32, text_pages=pages_of(64_257)
    )
    tiles, trees = np.zeros((plan.capacity, TILE_COLUMNS), np.int32), np.zeros((32, TREE_WORDS), np.int32)
    assert lay_tiles(segments, plan.tile_rows, tiles, trees) == len(lengths)
    ends = tiles[:, 3] + tiles[:, 4]
    read = (-(-ends // plan.block_n) * plan.block_n).sum()
    assert sum(lengths) < read < 1.1 * sum(lengths)
    assert sum(pages_of(end) for end in ends.tolist()) * PAGE_ROWS < 1.1 * sum(lengths)


def test_segments_that_do_not_fit_an_attention_plan_are_refused() -> None:
    wide = segment(Scattered(0, 1, 65), 0, np.random.default_rng(0))
    long = segment(Chain(0, 9), 0, np.random.default_rng(0))
    tiles, trees = np.zeros((2, TILE_COLUMNS), np.int32), np.zeros((16, 2), np.int32)
    with pytest.raises(ValueError, match="a mask of 65 columns, of at most 64"):
        lay_tiles([wide], 4, tiles, trees)
    with pytest.raises(ValueError, match="3 tiles of 9 rows, of at most 2 and 16"):
        lay_tiles([long], 4, tiles, trees)
    with pytest.raises(ValueError, match="no kernel for"):
        AttentionPlan.of(1, heads=1, kv_heads=1, dim=64, dtype=torch.float16, segments=1, text_pages=9)
    with pytest.raises(ValueError, match="3 of 2 heads"):
        AttentionPlan.of(1, heads=3, kv_heads=2, dim=64, dtype=torch.float32, segments=1, text_pages=9)


@pytest.mark.extended
def test_kernels_for_an_h100_spill_next_to_no_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = [it for plan in plans() for it in compiled(plan)]
    assert {it.kernel for it in found} == {"attend", "combine"}
    assert [it for it in found if it.spilled > SPILLED] == []
    assert max(it.shared for it in found) <= 227 * 1024 // 2  # two programs run on a processor
