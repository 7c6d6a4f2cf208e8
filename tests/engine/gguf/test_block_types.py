"""Blocks of quantized values become the numbers that their formats define: those of the format's own package."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest

from outrider.engine.checkpoints.block_types import HUB, QUANTIZED, SERVED, TYPES, check_served, dequantize
from outrider.errors import CheckpointError
from tests.engine.gguf.small_files import random_rows

COLUMNS = 768
HALVES = {  # where the scales in float16 are in a block
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q6_k": (208,),
    "mxfp4": (),
}
EXTREMES = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, -65504.0, 6e-8], np.float16)

Rows = np.ndarray[Any, np.dtype[Any]]


def reference(kind: str, rows: Rows) -> Rows:
    stored = rows.view({"f32": np.float32, "f16": np.float16}.get(kind, np.uint8))
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType(TYPES[kind].number)), np.float32)


def check(kind: str, rows: Rows) -> None:
    found, expected = dequantize(kind, rows), reference(kind, rows)
    missing = np.isnan(expected)
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(found), missing)
    np.testing.assert_array_equal(found.view(np.uint32)[~missing], expected.view(np.uint32)[~missing])


@pytest.mark.parametrize("kind", SERVED)
def test_all_bits_are_those_of_the_formats_package(kind: str) -> None:
    check(kind, random_rows(kind, 300, COLUMNS))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_extreme_scales(kind: str) -> None:
    blocks = random_rows(kind, 16 * len(EXTREMES), COLUMNS).reshape(16 * len(EXTREMES), -1, TYPES[kind].bytes)
    for number, at in enumerate(HALVES[kind]):
        scales = np.roll(np.tile(EXTREMES, 16), number * 3)
        blocks[:, :, at : at + 2] = scales.view(np.uint8).reshape(-1, 1, 2)
    if kind == "mxfp4":
        blocks[:, :, 0] = np.resize(np.array([0, 1, 2, 127, 128, 254, 255], np.uint8), len(blocks))[:, None]
    check(kind, blocks.reshape(len(blocks), -1))


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7F])
def test_blocks_of_one_byte(kind: str, byte: int) -> None:
    rows = np.full_like(random_rows(kind, 2, COLUMNS), byte)
    for at in HALVES[kind]:
        rows.reshape(2, -1, TYPES[kind].bytes)[:, :, at : at + 2] = [0, 60]  # 1.0
    check(kind, rows)


def test_sizes_are_those_of_the_formats_package() -> None:
    for name, it in TYPES.items() - HUB.items():
        if name != "q8_1":  # no file has it, and its size there is that of an older version
            assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(it.number)] == (it.values, it.bytes), name
        assert gguf.GGMLQuantizationType(it.number).name.lower() == name


def test_a_type_that_is_not_served_names_the_nearest() -> None:
    for name, it in TYPES.items() - HUB.items():
        if name in SERVED:
            check_served(name, "")
            continue
        with pytest.raises(CheckpointError, match=rf"^x is {name}, .* take a file in {it.nearest}, the nearest"):
            check_served(name, "x")
        assert it.nearest in SERVED
