"""Checkpoints of every layout load; the error of a wrong one names the file and the field."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.interface.engine import Engine
from outrider.engine.loading import load_engine
from outrider.errors import CheckpointError
from tests.engine.small_checkpoints import LLAMA3, Reference, assert_same, make_checkpoint, prompt


def load(folder: Path) -> Engine:
    return load_engine(folder, backend="native", dtype="float32", slots=1, threads=1)


def configure(**changes: Any) -> Callable[[Path], None]:
    """Changes fields of config.json; one that becomes None is removed."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        raw = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))

    return change


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def drop_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)


def store_integers(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: tensor.int() for name, tensor in load_file(path).items()}, path)


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (shutil.rmtree, ["no such folder"]),
        (remove("config.json"), ["config.json", "missing"]),
        (remove("tokenizer.json"), ["tokenizer.json", "missing"]),
        (remove("model.safetensors"), ["model.safetensors", "missing"]),
        (write("config.json", "{"), ["config.json", "not valid JSON"]),
        (write("config.json", "[]"), ["config.json", "object"]),
        (write("tokenizer.json", "{"), ["tokenizer.json", "not valid JSON"]),
        (write("generation_config.json", '{"eos_token_id": "x"}'), ["generation_config.json", "eos_token_id"]),
        (write("model.safetensors.index.json", "{}"), ["index.json", "weight_map"]),
        (
            write("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}'),
            ["b.safetensors", "missing"],
        ),
        (truncate, ["model.safetensors", "truncated or corrupt"]),
        (write("model.safetensors", "nonsense"), ["model.safetensors", "truncated or corrupt"]),
        (drop_tensor, ["model.safetensors", "model.layers.1.mlp.up_proj.weight", "missing"]),
        (store_integers, ["model.safetensors", "int32", "bfloat16"]),
        (
            configure(model_type="gpt2"),
            ["config.json", "model_type", "'gpt2'", "llama, mistral, ministral, qwen2, qwen3, gemma2"],
        ),
        (configure(model_type=None), ["config.json", "model_type", "None"]),
        (configure(hidden_size=-1), ["config.json", "hidden_size", "-1", "positive"]),
        (configure(hidden_size="64"), ["config.json", "hidden_size", "'64'"]),
        (configure(vocab_size=None), ["config.json", "vocab_size", "None"]),
        (configure(vocab_size=132), ["model.safetensors", "embed_tokens", "[131, 64]", "[132, 64]"]),
        (configure(num_key_value_heads=3), ["config.json", "num_key_value_heads", "divisor"]),
        (configure(head_dim=15), ["config.json", "head_dim", "even"]),
        (configure(rms_norm_eps=-1), ["config.json", "rms_norm_eps"]),
        (configure(hidden_act="gelu"), ["config.json", "hidden_act", "'silu'"]),
        (configure(tie_word_embeddings="no"), ["config.json", "tie_word_embeddings", "true or false"]),
        (configure(quantization_config={"bits": 4}), ["config.json", "quantization_config", "quant_method"]),
        (configure(rope_parameters={"rope_type": "yarn"}), ["config.json", "rope_parameters", "yarn", "llama3"]),
        (configure(rope_parameters={"rope_theta": 0}), ["config.json", "rope_parameters.rope_theta", "positive"]),
        (configure(rope_parameters={"rope_type": "llama3"}), ["config.json", "rope_parameters.factor", "None"]),
        (
            configure(rope_parameters={**LLAMA3, "low_freq_factor": 4.0}),
            ["config.json", "low_freq_factor", "below"],
        ),
        (configure(rope_parameters={"partial_rotary_factor": 0.5}), ["config.json", "partial_rotary_factor"]),
        (configure(rope_parameters=[1]), ["config.json", "rope_parameters", "object"]),
        (configure(num_hidden_layers=10**12), ["config.json", "num_hidden_layers", "at most 65536"]),
        (configure(max_position_embeddings=10**9), ["config.json", "max_position_embeddings", "at most 16777216"]),
        (configure(vocab_size=2**27), ["model.safetensors", "embed_tokens", "[131, 64]"]),  # before memory is taken
    ],
)
def test_a_defect_of_a_checkpoint_is_named(
    good: Path, tmp_path: Path, harm: Callable[[Path], None], named: list[str]
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(good, folder)
    harm(folder)
    with pytest.raises(CheckpointError) as raised:
        load(folder)
    for words in [str(folder), *named]:
        assert words in str(raised.value)


DAMAGE = [
    0,
    -1,
    1,
    2,
    3,
    7,
    2**31,
    2**40,
    2**63,
    1e300,
    math.nan,
    -0.5,
    True,
    "x",
    [],
    {},
    [1],
    {"rope_type": "linear"},
]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_checkpoint_is_refused_by_its_name_or_runs(good: Path, tmp_path: Path, data: st.DataObject) -> None:
    for file in good.iterdir():
        shutil.copy(file, tmp_path)
    raw = json.loads((good / "config.json").read_text())
    raw.setdefault("sliding_window", None)
    if data.draw(st.booleans()):
        for field in data.draw(st.lists(st.sampled_from([*raw]), min_size=1, max_size=3)):
            raw[field] = data.draw(st.sampled_from(DAMAGE))
        (tmp_path / "config.json").write_text(json.dumps(raw))
    else:
        weights = bytearray((good / "model.safetensors").read_bytes())
        header = 8 + int.from_bytes(weights[:8], "little")
        for place in data.draw(st.lists(st.integers(0, header + 64), max_size=6)):
            weights[place] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789"[]{},:'))
        weights = weights[: data.draw(st.sampled_from([len(weights), len(weights) - 1, header, 8, 0]))]
        (tmp_path / "model.safetensors").write_bytes(weights)
    engine, refusal = loaded(tmp_path)
    if engine is None:
        assert str(tmp_path) in refusal
    else:
        assert engine.forward([prompt(0, np.array([0]))]).shape == (1, engine.vocabulary)


def loaded(folder: Path) -> tuple[Engine | None, str]:
    """The engine, or why there is none."""
    try:
        return load(folder), ""
    except CheckpointError as error:
        return None, str(error)


def test_shards_give_the_logits_of_one_file(good: Path, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    tokens = np.arange(20)
    sharded, single = load(folder), load(good)
    assert (sharded.forward([prompt(0, tokens)]) == single.forward([prompt(0, tokens)])).all()
    assert sharded.parameters == single.parameters


def test_the_rope_of_older_checkpoints_is_read_too(tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta and rope_scaling, with `type` for `rope_type` in the oldest."""
    folder = make_checkpoint(tmp_path, "one-kv-head-llama3")
    expected = Reference.load(folder).logits(np.arange(100))
    scaling = {key: value for key, value in LLAMA3.items() if key not in ("rope_theta", "rope_type")}
    configure(rope_parameters=None, rope_theta=LLAMA3["rope_theta"], rope_scaling={**scaling, "type": "llama3"})(folder)
    assert_same(load(folder).forward([prompt(0, np.arange(100))]), expected)


def test_end_of_text_ids_come_from_the_generation_settings_first(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(good, folder)
    write("generation_config.json", '{"eos_token_id": [3, 4]}')(folder)
    assert read_config(folder).eos_ids == (3, 4)
    write("generation_config.json", "{}")(folder)
    assert read_config(folder).eos_ids == (0,)
    configure(eos_token_id=None)(folder)
    assert read_config(folder).eos_ids == ()


def test_a_sliding_window_bounds_the_context_of_an_engine_without_windows(tmp_path: Path) -> None:
    """Up to the window's length, sliding and full attention are the same."""
    folder = make_checkpoint(tmp_path, "mistral")
    assert read_config(folder).context == 256
    configure(sliding_window=100)(folder)
    config = read_config(folder)
    assert (config.context, config.within_windows().context) == (256, 100)
    assert config.within_windows().like_llama
    configure(sliding_window=300)(folder)
    assert read_config(folder).like_llama
