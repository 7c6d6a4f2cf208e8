"""Quantized checkpoints of the hub in the compiled engine, beside the same model with its values in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from outrider import _native
from outrider.engine.checkpoints.padding import pad_checkpoint
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.loading import load_engine
from outrider.errors import CheckpointError
from tests.engine.cpu.native_parts import llama_parts
from tests.engine.quantized.written import KV_HEADS, LAYOUTS, WIDTH, fp8, gptq, write, write_values
from tests.engine.ranked import leading, meet, meeting_point
from tests.engine.small_adapters import make_adapter
from tests.engine.small_checkpoints import adapted, assert_invariant, prompt

TOKENS = np.arange(60)
SORTED = gptq(4, 64, sorted_by_group=False)


def load(folder: Path, **changes: object) -> CpuEngine:
    settings: dict[str, object] = {"dtype": "stored", "slots": 2, "rows": 200, "threads": 2} | changes
    return CpuEngine.load(folder, EngineSettings(**settings))  # type: ignore[arg-type]


def logits(engine: Engine) -> np.ndarray:
    return engine.forward([prompt(0, TOKENS)])


def check_close(found: np.ndarray, exact: np.ndarray) -> None:
    """Inputs are rounded to 8 bits in blocks of 32, keys and values to bfloat16."""
    assert 0 < np.sqrt(((found - exact) ** 2).mean()) / exact.std() < 0.03


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_values(name: str, tmp_path: Path) -> None:
    exact = load(write_values(tmp_path / "exact", write(tmp_path / "m", LAYOUTS[name])), dtype="float32")
    engine = load_engine(tmp_path / "m", dtype="auto", slots=1, rows=100, threads=2)
    assert engine.dtype == LAYOUTS[name].kind
    check_close(logits(engine), logits(exact))
    assert np.array_equal(logits(load(tmp_path / "m", dtype="float32")), logits(exact))


def test_a_padded_model_has_the_same_logits(tmp_path: Path) -> None:
    write(tmp_path / "m", LAYOUTS["awq-64"])
    exact = logits(load(tmp_path / "m", dtype="float32"))
    pad_checkpoint(tmp_path / "m", tmp_path / "padded", parameters=6_000_000)
    padded = logits(load_engine(tmp_path / "padded", dtype="float32", slots=1, rows=100))
    assert np.abs(padded - exact).max() < 1e-4


@pytest.mark.parametrize("instructions", _native.instruction_sets())
@pytest.mark.parametrize("name", ["packed-asymmetric", "gptq-desc-act", "int8-outputs", "fp8-blocks", "nvfp4-modelopt"])
def test_a_tokens_bits_are_the_same_in_every_batch(name: str, instructions: str, tmp_path: Path) -> None:
    write(tmp_path / "m", LAYOUTS[name])
    assert_invariant(load(tmp_path / "m", instructions=instructions), nodes=37)


def is_quantized(name: str) -> bool:
    return name not in ("self_attn.k_proj", "mlp.up_proj")


def test_the_weights_of_a_product_have_one_order_of_inputs(tmp_path: Path) -> None:
    write(tmp_path / "m", SORTED, quantized=is_quantized)
    with pytest.raises(CheckpointError, match=r"q_proj.weight and .*k_proj.weight have their inputs in different"):
        load(tmp_path / "m")


@pytest.mark.parametrize("name", ["awq-128", "fp8-blocks"])
def test_a_weight_that_is_not_quantized_may_lie_beside_others(name: str, tmp_path: Path) -> None:
    values = write(tmp_path / "m", LAYOUTS[name], quantized=is_quantized)
    check_close(logits(load(tmp_path / "m")), logits(load(write_values(tmp_path / "exact", values), dtype="float32")))


@pytest.mark.parametrize("layout", [LAYOUTS["packed-128"], LAYOUTS["int8-outputs"], fp8("block")])
def test_ranks_share_a_model(layout: object, tmp_path: Path) -> None:
    write(tmp_path / "m", layout)  # type: ignore[arg-type]
    alone = logits(load(tmp_path / "m"))
    with leading(tmp_path / "m", 2, dtype="stored") as engine:
        found = logits(engine)
    assert np.abs(found - alone).max() < 0.05 * alone.std()


def test_ranks_cannot_share_inputs_that_are_sorted_by_group(tmp_path: Path) -> None:
    write(tmp_path / "m", SORTED)
    groups = [it.result() for it in meet(2, meeting_point())]
    for group in groups:
        with pytest.raises(CheckpointError, match=r"ranks cannot share tensor .*o_proj.* \(desc_act\): let one rank"):
            load(tmp_path / "m", group=group)
        group.close()


def test_an_adapter_sees_its_own_inputs(tmp_path: Path) -> None:
    """The weights' inputs are in another order than the adapter's."""
    exact = write_values(tmp_path / "exact", write(tmp_path / "m", SORTED))
    folder = make_adapter(exact, tmp_path / "adapter")
    found = []
    for engine in (load(tmp_path / "m"), load(exact, dtype="float32")):
        changed, _ = engine.load_adapter(folder)
        found.append(engine.forward([adapted(prompt(0, TOKENS), changed)]))
        assert np.abs(found[-1] - logits(engine)).max() > found[-1].std()
    check_close(*found)


def test_an_order_that_is_none_is_refused() -> None:
    angles = np.zeros((8, 32), np.float32)
    shape = (32, 32, WIDTH, 1, KV_HEADS, KV_HEADS, 64, 32, 8, 1, 8, 1e-5, 0)
    model = _native.Model(
        "stored", "stored", "bfloat16", shape, *llama_parts(1, 64), angles, angles, 1, "", (), False, (0, 0.0, ())
    )
    blocks = np.zeros((32, WIDTH // 128 * 69), np.uint8)
    for order in (np.zeros(WIDTH), np.arange(1, WIDTH + 1), np.arange(-1, WIDTH - 1), np.arange(WIDTH - 1)):
        with pytest.raises(ValueError, match=r"names each input once|a buffer of 256 items"):
            model.set_ends(None, np.ones(WIDTH, np.float32), ("int4_128", blocks, order.astype(np.int32)))
