"""Which engine a checkpoint gets, and the error where it gets none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.gpu import DeviceEngine
from outrider.engine.loading import ENGINES, chosen_backend, load_engine, outline
from outrider.engine.transformers.engine import TransformersEngine
from outrider.engine.transformers.treeless import TreelessEngine
from outrider.errors import CheckpointError, ConfigError
from outrider.hub import Backend
from tests.engine.families import CONTEXT, make_family
from tests.engine.small_checkpoints import make_checkpoint


def load(folder: Path, **changes: Any) -> Any:
    return load_engine(folder, **{"dtype": "float32", "slots": 1, "threads": 1, **changes})


def test_a_family_known_to_the_native_engine_gets_it_by_default(tmp_path: Path) -> None:
    native, other = make_checkpoint(tmp_path / "llama"), make_family(tmp_path / "gpt2", "gpt2")
    assert type(load(native)) is CpuEngine
    assert type(load(native, backend="transformers")) is TransformersEngine
    assert type(load(other)) is TransformersEngine
    assert type(load(make_family(tmp_path / "mamba", "mamba"))) is TreelessEngine
    with pytest.raises(CheckpointError, match="model_type is 'gpt2', must be one of llama"):
        load(other, backend="native")


def test_torch_serves_where_the_compiled_kernels_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path)
    monkeypatch.setitem(sys.modules, "outrider._native", None)  # as if it had not been built
    with caplog.at_level("WARNING", "outrider"):
        engine = load(folder)
    assert type(engine) is DeviceEngine
    assert "was not built when Outrider was installed, which needs a C++ compiler" in engine.computed_by
    assert f"{folder} is computed by torch, not by the compiled kernels: it was not built" in caplog.text


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "without the compiled kernels .* a model"),
        ({"device": "cuda"}, "device cuda"),
        ({"backend": "transformers"}, "llama"),
    ],
)
def test_a_setting_that_needs_torch_names_how_to_install_it(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    program = f"""
import sys
from pathlib import Path
sys.modules["torch"] = None
from outrider.engine.loading import load_engine
load_engine(Path({str(folder)!r}), **{{"dtype": "float32", "slots": 1, **{changes!r}}})
"""
    env = {**os.environ, "OUTRIDER_ENGINE": "torch"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert re.search(rf"ConfigError: .*{what} needs PyTorch, .*; pip install 'outrider\[torch\]'", ran.stderr), (
        ran.stderr
    )


def test_torch_serves_if_the_environment_selects_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ENGINE", "torch")
    assert load(make_checkpoint(tmp_path)).computed_by.endswith("OUTRIDER_ENGINE=torch is set")


def test_invariant_numerics_are_for_the_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path)
    assert load(folder).numerics == load(folder, numerics="invariant").numerics == "invariant"
    monkeypatch.setenv("OUTRIDER_ENGINE", "torch")
    assert load(folder).numerics == "fast"
    with pytest.raises(ConfigError, match="numerics: invariant is for the compiled kernels alone, and OUTRIDER_ENGINE"):
        load(folder, numerics="invariant")


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_torch_quantizes_nothing_on_a_cpu(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ENGINE", "torch")
    with pytest.raises(ConfigError, match=f"dtype: {dtype} on a CPU is for the compiled kernels .*; use bfloat16"):
        load(make_checkpoint(tmp_path), dtype=dtype)


@pytest.mark.parametrize("changes", [{}, {"device": "cuda"}, {"backend": "transformers"}])
def test_kv_in_int8_is_refused_by_engines_that_do_not_serve_it(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_ENGINE", "torch")
    with pytest.raises(ConfigError, match="kv_dtype: int8 is served by the compiled engine alone; leave it out"):
        load(make_checkpoint(tmp_path), kv_dtype="int8", **changes)


def test_the_host_chooses_tokens_where_torch_serves_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ENGINE", "torch")
    engine = load(make_checkpoint(tmp_path), dtype="bfloat16", kv_memory=1 << 30)
    assert (
        engine.samples_tokens,
        engine.restricts_tokens,
        engine.grows_trees,
        engine.begins_next_pass,
        engine.frees_host,
    ) == (False,) * 5


def test_a_checkpoint_is_described_without_being_loaded(tmp_path: Path) -> None:
    gpt2 = outline(make_family(tmp_path / "gpt2", "gpt2"))
    assert (gpt2.model_type, gpt2.vocabulary, gpt2.context) == ("gpt2", 131, CONTEXT)
    windowed = make_family(tmp_path / "mistral", "mistral-window")
    assert chosen_backend(windowed, "auto") == "native"
    assert outline(windowed).context == outline(windowed, "transformers").context == CONTEXT


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layers": 2}, "layers, skip: only the native backend"),
        ({"skip": (1,)}, "layers, skip: only the native backend"),
        ({"numerics": "invariant"}, "numerics: invariant is for the native backend"),
    ],
)
def test_settings_that_need_the_native_engine_are_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = make_family(tmp_path, "gpt2")
    with pytest.raises(ConfigError, match=named):
        load(folder, **changes)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": "no-such-family"}, "no-such-family"),
        ({"model_type": None}, "model_type is None"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
    ],
)
def test_a_configuration_that_transformers_does_not_know_is_named(
    values: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = make_family(tmp_path, "gpt2") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    weights = make_family(tmp_path, "gpt2") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: transformers cannot load it: "):
        load(tmp_path)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    import torch

    make_family(tmp_path, "gpt2")
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(("missing", "dtype"), [("transformers", "float32"), ("torchao", "int8")])
def test_a_missing_package_is_named_with_its_install_command(missing: str, dtype: str, tmp_path: Path) -> None:
    folder = make_family(tmp_path, "gpt2")
    script = (
        "import sys\n"
        f"sys.modules[{missing!r}] = None\n"
        "from pathlib import Path\n"
        "from outrider.engine.loading import load_engine\n"
        "from outrider.errors import ConfigError\n"
        "try:\n"
        f"    load_engine(Path({str(folder)!r}), dtype={dtype!r}, slots=1)\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'outrider[transformers]'" in done.stdout


def test_the_native_engine_does_not_import_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from outrider.engine.loading import load_engine\n"
        f"load_engine(Path({str(folder)!r}), dtype='float32', slots=1)\n"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


def test_unpickable_ids_need_a_backend_that_excludes_them(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"outrider_unpadded_vocabulary": 100}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="must never choose"):
        load_engine(folder, backend="transformers", dtype="float32", slots=1)
    with pytest.raises(ConfigError, match="device: cuda is for the native backend"):
        load_engine(folder, backend="transformers", dtype="float32", slots=1, device="cuda")
    assert load_engine(folder, dtype="float32", slots=1).vocabulary == 131


def test_the_configuration_names_the_engines_that_there_are() -> None:
    assert {"auto", *(kind.backend for kind in ENGINES)} == {*get_args(Backend)}
