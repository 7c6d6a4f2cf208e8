"""Quantized copies: what they compute is held against arithmetic in numpy, their logits against the original."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.checkpoints.padding import pad_checkpoint
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.torch_layers.engine import NativeEngine
from outrider.engine.torch_layers.int4 import GROUP
from outrider.engine.torch_layers.quantized import PIECE, int4_linear, int8_linear, quantize_int4, quantize_int8
from outrider.errors import ConfigError
from tests.engine.conftest import EngineClass
from tests.engine.small_checkpoints import MODELS, SHAPES, Tree, make_checkpoint, prompt, random_tokens

Matrix = NDArray[np.float64]
Quantized = Literal["int8", "int4"]
BF16 = 2.0**-7  # the most that a step of bfloat16 is of a value; rounding errs by half of it
ROWS = (1, 2, 3, 8, 33)
SHAPES_OF_8 = [(131, 99), (64, 256), (PIECE + 7, 33), (7, 3), (1, 1)]
SHAPES_OF_4 = [(16, 32), (48, 64), (256, 704), (2 * PIECE + 80, 96), (PIECE + 16, 32)]


def draw(*size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def dequantized_int8(weight: torch.Tensor) -> tuple[Matrix, Matrix]:
    """The slow reference, a channel at a time: dequantized weights and steps, each [out, in]."""
    values, steps = np.zeros(weight.shape), np.zeros(weight.shape)
    for row, channel in enumerate(weight.double().numpy()):
        steps[row] = np.abs(channel).max() / 127
        values[row] = np.round(channel / steps[row]) * steps[row]
    return values, steps


def dequantized_int4(weight: torch.Tensor) -> tuple[Matrix, Matrix]:
    """The slow reference, a group at a time; its scale and offset are stored in bfloat16."""
    values, steps = np.zeros(weight.shape), np.zeros(weight.shape)
    for row, channel in enumerate(weight.double().numpy()):
        for start in range(0, len(channel), GROUP):
            group = channel[start : start + GROUP]
            span = (group.max() - group.min()) / 15
            stored = torch.tensor([span, group.min() + 8 * span], dtype=torch.float32).bfloat16().double()
            scale, offset = stored.tolist()
            codes = np.clip(np.round((group - offset) / scale) + 8, 0, 15)
            values[row, start : start + GROUP] = (codes - 8) * scale + offset
            steps[row, start : start + GROUP] = scale
    return values, steps


def test_int8_weights_are_within_half_a_step_and_those_of_the_slow_reference() -> None:
    weight = draw(50, 99)
    codes, scales = quantize_int8(weight)
    ours = codes.double() * scales.double()[:, None]
    reference, steps = dequantized_int8(weight)
    assert np.abs(ours.numpy() - reference).max() < 1e-6
    assert (np.abs(ours.numpy() - weight.numpy()) <= steps / 2 + 1e-6).all()


def test_int4_weights_are_within_half_a_step_and_those_of_the_slow_reference() -> None:
    weight = draw(48, 3 * GROUP) + 0.3
    codes, groups = quantize_int4(weight)
    scales, offsets = groups.double().transpose(0, 1).repeat_interleave(GROUP, 1).unbind(2)
    ours = (codes - 8) * scales + offsets
    reference, steps = dequantized_int4(weight)
    assert np.abs(ours.numpy() - reference).max() < 1e-6
    # A scale that bfloat16 made smaller leaves up to 8 times as much uncovered at the ends, and an offset all of it.
    stored = BF16 / 2 * (8 * steps + np.abs(offsets.numpy()))
    assert (np.abs(ours.numpy() - weight.numpy()) <= steps / 2 + stored).all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_weights_that_are_all_alike_are_kept_exactly(dtype: Quantized) -> None:
    """Rows of zeros above all, which padded checkpoints have many of."""
    weight = torch.zeros(32, 64)
    weight[1], weight[2] = 0.25, -1.5
    linear = (int8_linear if dtype == "int8" else int4_linear)(weight, None)
    x = torch.ones(2, 64)
    assert torch.equal(linear(x).float(), x @ weight.T)
    assert torch.equal(linear(torch.zeros(2, 64)).float(), torch.zeros(2, 32))


@pytest.mark.parametrize("shape", SHAPES_OF_8)
@pytest.mark.parametrize("biased", [False, True])
def test_an_int8_linear_is_integer_arithmetic_bit_for_bit(shape: tuple[int, int], biased: bool) -> None:
    weight, bias = draw(*shape), draw(shape[0], seed=2) if biased else None
    linear = int8_linear(weight, bias)
    codes, scales = quantize_int8(weight)
    for rows in ROWS:
        x = draw(rows, shape[1], seed=rows)
        scale = x.abs().amax(1, keepdim=True) * torch.tensor(1 / 127)
        sums = (x / scale).round().long().numpy() @ codes.long().numpy().T
        expected = torch.from_numpy(sums).float() * scales * scale
        assert torch.equal(linear(x), expected if bias is None else expected + bias)


@pytest.mark.parametrize("shape", SHAPES_OF_8)
def test_an_int8_linear_errs_by_no_more_than_half_steps_add_up_to(shape: tuple[int, int]) -> None:
    weight = draw(*shape)
    x = draw(8, shape[1], seed=3)
    w_step = dequantized_int8(weight)[1] / 2  # [out, in]
    x_step = np.abs(x.double().numpy()).max(1, keepdims=True) / 127 / 2  # [rows, 1]
    absolute = np.abs(x.double().numpy())
    bound = absolute @ w_step.T + x_step * (np.abs(weight.double().numpy()) + w_step).sum(1)
    exact = (x.double() @ weight.double().T).numpy()
    assert (np.abs(int8_linear(weight, None)(x).double().numpy() - exact) <= bound + 1e-5).all()


@pytest.mark.parametrize("shape", SHAPES_OF_4)
@pytest.mark.parametrize("biased", [False, True])
def test_an_int4_linear_is_the_product_with_the_dequantized_weights(shape: tuple[int, int], biased: bool) -> None:
    weight, bias = draw(*shape), draw(shape[0], seed=2).bfloat16() if biased else None
    linear = int4_linear(weight, bias)
    values = dequantized_int4(weight)[0]
    for rows in ROWS:
        x = draw(rows, shape[1], seed=rows).bfloat16()
        exact = x.double().numpy() @ values.T
        added = 0.0 if bias is None else bias.double().numpy()
        summed = 1e-5 * (np.abs(x.double().numpy()) @ np.abs(values).T)  # in float32
        # The product is rounded to bfloat16, and what the bias makes of it once more.
        bound = BF16 / 2 * (np.abs(exact) + np.abs(exact + added)) * (1 + BF16) + summed
        assert (np.abs(linear(x).double().numpy() - exact - added) <= bound).all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_quantized_copys_logits_differ_by_what_the_steps_account_for(
    shape: str, dtype: Quantized, engine_class: EngineClass, tmp_path: Path
) -> None:
    """Rounding to a step s errs by s / sqrt(12) (root mean square), relative to what is rounded.

    Inputs of int8 are never larger than sqrt(n) times their root mean square. Independent errors of all linears add up
    in squares, in logits as in what goes before; twice that leaves room for what amplifies them on the way.
    """
    folder = make_checkpoint(tmp_path, shape, ffn=96)
    original, copy = (engine_class.load(folder, dtype=kind, slots=1, threads=1) for kind in ("float32", dtype))
    tokens = random_tokens(original, np.random.default_rng(1), 100)
    exact, quantized = (engine.forward([prompt(0, tokens)]) for engine in (original, copy))
    noise = 0.0
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
            step = quantize_int8(weight)[1] if dtype == "int8" else quantize_int4(weight)[1][..., 0].float()
            noise += float((step**2).mean() / 12 / (weight**2).mean())
            noise += weight.shape[1] / 127**2 / 12 if dtype == "int8" else BF16**2 / 12
    relative = np.sqrt(((quantized - exact) ** 2).mean()) / exact.std()
    assert 0 < relative <= 2 * noise**0.5


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_quantized_copy_keeps_invariant_numerics(dtype: Quantized) -> None:
    engine = CpuEngine.load(MODELS / "drafter", dtype=dtype, slots=2, rows=200, threads=1)
    random = np.random.default_rng(4)
    history, tree = random_tokens(engine, random, 40), Tree.random(engine, random, 20)
    engine.forward([prompt(0, history, wanted=0)])
    logits = engine.forward([tree.segment(0, len(history))])
    path = tree.path(19)
    text = np.concatenate([history, tree.tokens[path]])
    alone = [engine.forward([prompt(1, text[at : at + 1], at)])[0] for at in range(len(text))]
    assert np.array_equal(logits[path], alone[len(history) :])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_two_threads_give_the_bits_of_one(dtype: Quantized, two_threads: None) -> None:
    linear = (int8_linear if dtype == "int8" else int4_linear)(draw(512, 256), None)
    x = draw(40, 256, seed=5)
    torch.set_num_threads(1)
    alone = linear(x)
    torch.set_num_threads(2)
    assert torch.equal(linear(x), alone)


def test_the_bytes_of_a_pass_are_those_of_codes_and_scales(engine_class: EngineClass) -> None:
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
        engine = engine_class.load(MODELS / "target", dtype=dtype, slots=1, threads=1)  # type: ignore[arg-type]
        assert engine.weight_bytes == config.layers * sum(layer) + head


def test_a_weight_that_the_int4_kernel_does_not_take_is_named(engine_class: EngineClass, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype: int4 needs .* 32 inputs and 16 outputs.*\b198 outputs; use int8"):
        engine_class.load(make_checkpoint(tmp_path), dtype="int4", slots=1, threads=1)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("lacking", ["capability", "kernel"])
def test_a_machine_without_the_kernels_is_refused(
    dtype: Quantized, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking == "capability":
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    elif dtype == "int8":  # a sum that saturated
        monkeypatch.setattr(
            "outrider.engine.torch_layers.quantized._int8_product", lambda codes, scales: lambda x: x[:, :16].float()
        )
    else:
        monkeypatch.setattr("outrider.engine.torch_layers.quantized._has_int4", lambda: False)
    with pytest.raises(ConfigError, match=f"dtype: {dtype} needs a CPU with AVX-512 VNNI.*use bfloat16"):
        NativeEngine.load(MODELS / "drafter", dtype=dtype, slots=1, threads=1)


MEASURE = """
import sys
from pathlib import Path
from outrider.engine.torch_layers.engine import NativeEngine

def peak():  # getrusage would begin with the parent's
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))

def load(folder):
    return NativeEngine.load(Path(folder), dtype=sys.argv[1], slots=1, rows=8, threads=1)

load("models/drafter")  # the libraries' own memory
before = peak()
engine = load(sys.argv[2])
print(peak() - before, engine.weight_bytes)
"""


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("padded") / "target"
    pad_checkpoint(MODELS / "target", folder, parameters=60_000_000)
    return folder


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_no_second_copy_of_the_weights_is_in_memory_while_they_are_quantized(dtype: Quantized, padded: Path) -> None:
    """Beside what is kept, one linear at a time: mapped, put together, as codes and packed, 6 bytes a weight."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, dtype, str(padded)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # memory that is freed goes back at once
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    grown, kept = map(int, done.stdout.split())
    config = read_config(padded)
    head = config.vocabulary * config.width
    held = kept + 2 * head  # the embedding is in bfloat16
    bound = held + 6 * max(head, 2 * config.ffn * config.width) + 2**22
    assert bound < held + (kept - head)  # a second copy of the layers would not go unnoticed
    assert grown <= bound


@pytest.fixture
def two_threads() -> Iterator[None]:
    yield
    torch.set_num_threads(1)  # the number is the process's, and other engines count on theirs
