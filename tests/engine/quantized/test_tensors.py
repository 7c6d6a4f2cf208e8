"""Quantized checkpoints of the hub: their values, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.checkpoints.block_types import TYPES
from outrider.engine.checkpoints.checkpoint import Weights, has_blocks, read_config
from outrider.errors import CheckpointError
from tests.engine.quantized.written import FFN, LAYOUTS, WIDTH, write

DOWN = "model.layers.0.mlp.down_proj"
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    expected = write(tmp_path / "m", layout)
    weights = Weights(tmp_path / "m")
    assert has_blocks(tmp_path / "m")
    assert weights.main_kind == layout.kind
    for tensor, values in expected.items():
        np.testing.assert_array_equal(weights.array(tensor, *values.shape).astype(np.float32), values)
    values = expected[f"{DOWN}.weight"]
    part = weights.array(f"{DOWN}.weight", *values.shape, rows=slice(24, 89), columns=slice(32, 96))
    np.testing.assert_array_equal(part, values[24:89, 32:96])


def test_inputs_that_fill_no_large_blocks_are_in_small_ones(tmp_path: Path) -> None:
    for name, kind in {"int8-outputs": "int8_32", "fp8-blocks": "fp8_32", "nvfp4-modelopt": "nvfp4_64"}.items():
        parts, values = LAYOUTS[name].weight(np.random.default_rng(1), 8, 576)
        folder = tmp_path / name
        write(folder, LAYOUTS[name])
        tensors = {f"x.{suffix}": it.contiguous() for suffix, it in parts.items()}
        save_file(tensors, folder / "model.safetensors")
        weights = Weights(folder)
        assert weights.kind("x.weight") == kind
        np.testing.assert_array_equal(weights.array("x.weight", 8, 576), values)
        assert weights.blocks("x.weight", 8, 576).shape == (8, 576 // TYPES[kind].values * TYPES[kind].bytes)


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """The folder with other tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: it.contiguous() for name, it in tensors.items()}, file)
    return folder


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.pop(name)  # type: ignore[return-value]


def replaced(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: value(tensors[name])})


@pytest.mark.parametrize(
    ("layout", "change", "problem"),
    [
        ("awq-128", without(f"{DOWN}.scales"), r"down_proj.scales is missing"),
        ("awq-128", without(f"{DOWN}.qzeros"), r"down_proj.qzeros is missing"),
        ("awq-128", replaced(f"{DOWN}.qweight", lambda it: it[:, :-1]), r"scales is F16 of shape"),
        ("awq-128", replaced(f"{DOWN}.qweight", lambda it: it[:-3]), r"do not fit one another"),
        ("awq-128", replaced(f"{DOWN}.qweight", lambda it: it.flatten()), r"do not fit one another"),
        ("gptq-128", replaced(f"{DOWN}.qzeros", lambda it: it[:1]), r"qzeros is I32 of shape \[1, 32\]"),
        ("gptq-128", replaced(f"{DOWN}.g_idx", lambda it: it + 1), r"g_idx has groups of different sizes"),
        ("gptq-128", replaced(f"{DOWN}.g_idx", lambda it: torch.zeros_like(it)), r"g_idx has groups of different"),
        ("gptq-8-bits", replaced(f"{DOWN}.qzeros", lambda it: torch.full_like(it, -1)), r"qzeros has zeros beyond"),
        ("packed-128", replaced(f"{DOWN}.weight_shape", lambda it: it * 0), r"for a weight of shape \[0, 0\]"),
        ("packed-128", replaced(f"{DOWN}.weight_shape", lambda it: -it), r"for a weight of shape"),
        ("packed-128", replaced(f"{DOWN}.weight_shape", lambda it: it + 1), r"4 and of 8 bits are served"),
        ("packed-128", replaced(f"{DOWN}.weight_scale", lambda it: it[:, :3]), r"weight_scale has shape \[256, 3\]"),
        ("packed-128", replaced(f"{DOWN}.weight_packed", lambda it: it.flatten()), r"weight_packed has shape"),
        ("int8-outputs", replaced(f"{DOWN}.weight_scale", lambda it: it.flatten()), r"weight_scale has shape \[256\]"),
        ("fp8-blocks", replaced(f"{DOWN}.weight_scale_inv", lambda it: it[:1]), r"each block of 128 x 128 are served"),
        ("fp8-blocks", without(f"{DOWN}.weight_scale_inv"), r"weight_scale_inv is missing"),
        ("nvfp4-compressed", without(f"{DOWN}.weight_global_scale"), r"weight_scale_2 is missing"),
        (
            "nvfp4-modelopt",
            replaced(f"{DOWN}.weight_scale", lambda it: it[:, :-1]),
            r"weight_scale is F8_E4M3 of shape",
        ),
        ("mxfp4", replaced(f"{DOWN}.weight_scale", lambda it: it.short()), r"weight_scale is I16 of shape"),
    ],
)
def test_tensors_that_contradict_one_another_are_refused_by_name(
    layout: str, change: Callable[[dict[str, torch.Tensor]], None], problem: str, tmp_path: Path
) -> None:
    write(tmp_path / "m", LAYOUTS[layout])
    with pytest.raises(CheckpointError, match=problem):
        Weights(changed(tmp_path / "m", change)).array(f"{DOWN}.weight", WIDTH, FFN)


@pytest.mark.parametrize("name", ["fp8-blocks", "nvfp4-modelopt"])
def test_values_that_are_no_numbers_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / "m", LAYOUTS[name])
    spoiled = f"{DOWN}.weight_scale" if name.startswith("nvfp4") else f"{DOWN}.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[spoiled].view(torch.uint8)[3, 5] = 0xFF

    with pytest.raises(CheckpointError, match="values that are no numbers"):
        Weights(changed(tmp_path / "m", change)).array(f"{DOWN}.weight", WIDTH, FFN)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, .* compressed-tensors in int8 or int4"),
        ({"quant_method": "gptq", "bits": 3}, "gptq, bits 3, .* gptq with 4 or 8 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin', .* checkpoint_format gptq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "'gemv', .* version gemm"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "'marlin-24', .* pack-quantized"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ', .* FP8 or NVFP4"),
        ({"quant_method": "new"}, "quantized with new, .* gptq with 4 bits"),
        ({"bits": 4}, "has no quant_method"),
        (["gptq"], "has no quant_method"),
        ({"quant_method": 4}, "has no quant_method"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "transform_config": {"R1": {}}},
            "transform_config, .* without one",
        ),
    ],
)
def test_methods_that_are_not_served_are_named_with_the_nearest_that_is(
    config: Any, problem: str, tmp_path: Path
) -> None:
    write(tmp_path / "m", LAYOUTS["gptq-128"])
    path = tmp_path / "m/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=problem):
        read_config(tmp_path / "m")


def test_groups_of_no_block_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m", LAYOUTS["awq-32"])

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for suffix in ("scales", "qzeros"):
            tensors[f"{QUERY}.{suffix}"] = tensors[f"{QUERY}.{suffix}"].repeat(2, 1)

    with pytest.raises(CheckpointError, match=r"q_proj has 256 inputs in groups that are no multiples of 32"):
        Weights(changed(tmp_path / "m", change))
