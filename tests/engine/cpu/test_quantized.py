"""Quantized copies in the compiled engine: their logits against the original's, their bytes and their bits."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors.torch import load_file

from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.torch_layers.int4 import GROUP
from outrider.errors import ConfigError
from tests.engine.small_checkpoints import (
    MODELS,
    SHAPES,
    assert_invariant,
    int4_steps,
    int8_steps,
    make_checkpoint,
    prompt,
    random_tokens,
)

Quantized = Literal["int8", "int4"]
BF16 = 2.0**-7  # the most that a step of bfloat16 is of a value; rounding errs by half of it


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_quantized_copys_logits_differ_within_the_quantization_error(
    shape: str, dtype: Quantized, tmp_path: Path
) -> None:
    """Rounding to a step s errs by s / sqrt(12) (root mean square), relative to what is rounded.

    Inputs of int8 are never larger than sqrt(n) times their root mean square. Independent errors of all linears add up
    in squares, in logits as in what goes before; twice that leaves room for what amplifies them on the way.
    """
    folder = make_checkpoint(tmp_path, shape, ffn=96)
    original, copy = (
        CpuEngine.load(folder, EngineSettings(dtype=kind, slots=1, threads=1)) for kind in ("float32", dtype)
    )
    tokens = random_tokens(original, np.random.default_rng(1), 100)
    exact, quantized = (engine.forward([prompt(0, tokens)]) for engine in (original, copy))
    noise = 0.0
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
            step = int8_steps(weight) if dtype == "int8" else int4_steps(weight)[0]
            noise += float((step**2).mean() / 12 / (weight**2).mean())
            noise += weight.shape[1] / 127**2 / 12 if dtype == "int8" else BF16**2 / 12
    relative = np.sqrt(((quantized - exact) ** 2).mean()) / exact.std()
    assert 0 < relative <= 2 * noise**0.5


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_quantized_copy_keeps_invariant_numerics(dtype: Quantized) -> None:
    engine = CpuEngine.load(MODELS / "drafter", EngineSettings(dtype=dtype, slots=2, rows=200, threads=1))
    assert_invariant(engine, nodes=20)


def test_a_quantized_pass_reads_the_bytes_of_codes_and_scales() -> None:
    config = read_config(MODELS / "target")
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linears = [  # outputs and inputs
        (queries + 2 * keys, config.width),
        (config.width, queries),
        (2 * config.ffn, config.width),
        (config.width, config.ffn),
    ]
    in_8 = [outputs * (inputs + 4) for outputs, inputs in linears]
    in_4 = [outputs * (inputs // 2 + inputs // GROUP * 4) for outputs, inputs in linears]
    head = config.vocabulary * (config.width + 4)
    for dtype, layer in (("int8", in_8), ("int4", in_4)):
        engine = CpuEngine.load(MODELS / "target", EngineSettings(dtype=dtype, slots=1, threads=1))  # type: ignore[arg-type]
        assert engine.weight_bytes == config.layers * sum(layer) + head


def test_a_weight_that_the_int4_kernel_does_not_take_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype: int4 needs .* 32 inputs and 16 outputs.*\b198 outputs; use int8"):
        CpuEngine.load(make_checkpoint(tmp_path), EngineSettings(dtype="int4", slots=1, threads=1))
