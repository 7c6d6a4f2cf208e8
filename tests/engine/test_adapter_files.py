"""An adapter is read once, from its two files and no others: its digest is of what was loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from outrider.engine.adapters.low_rank import (
    CONFIG,
    MOST_PATTERNS,
    TENSORS,
    most_bytes,
    read_adapter,
    read_files,
)
from outrider.engine.checkpoints.checkpoint import read_config
from outrider.errors import CheckpointError
from tests.engine.small_adapters import make_adapter
from tests.engine.small_checkpoints import make_checkpoint

SECRET = "correct horse battery staple"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(checkpoint, tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def adapter(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "adapters" / "adapter"))


REPLACED = """
import sys, threading, time
from pathlib import Path
from outrider.engine.adapters.low_rank import TENSORS, read_adapter
from outrider.engine.checkpoints.checkpoint import read_config
from outrider.errors import CheckpointError

config, folder = read_config(Path(sys.argv[1])), Path(sys.argv[2])
others = [Path(it).read_bytes() for it in sys.argv[3:]]
ended = threading.Event()

def replace():
    while not ended.is_set():
        for content in others:
            for _ in range(10):
                (folder / TENSORS).write_bytes(content)
            time.sleep(0.005)  # a whole one is there for a moment

thread = threading.Thread(target=replace)
thread.start()
found, refused, reads = {}, 0, 0
while reads < 300 or len(found) < 2:
    reads += 1
    try:
        read = read_adapter(folder, config)
    except CheckpointError as error:
        assert str(folder) in str(error), error
        refused += 1
    else:
        weights = [it.tobytes() for layer in read.layers.values() for update in layer.values() for it in update]
        assert found.setdefault(read.digest, weights) == weights, "one digest, several weights"
ended.set()
thread.join()
print(len(found), refused)
"""


def test_an_adapter_replaced_during_loading_is_one_version_or_an_error(
    checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    """In a process of its own, which a memory map would end with SIGBUS."""
    other = make_adapter(checkpoint, tmp_path / "other", seed=2)
    contents = [shutil.copy(folder / TENSORS, tmp_path / name) for folder, name in ((adapter, "a"), (other, "b"))]
    done = subprocess.run(
        [sys.executable, "-c", REPLACED, str(checkpoint), str(adapter), *map(str, contents)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    versions, _ = map(int, done.stdout.split())
    assert versions >= 2


@pytest.mark.parametrize("target", ["../../other/weights", "/absolute", "own"])
def test_no_index_leads_to_other_weights(checkpoint: Path, adapter: Path, tmp_path: Path, target: str) -> None:
    other = make_adapter(checkpoint, tmp_path / "other", seed=2)
    named = {"/absolute": str(other / TENSORS), "own": "own.safetensors"}.get(target, "../../other/" + TENSORS)
    shutil.copy(other / TENSORS, adapter / "own.safetensors")
    before = read_adapter(adapter, read_config(checkpoint))
    index = {"weight_map": dict.fromkeys(load_file(other / TENSORS), named)}
    for name in ("model.safetensors.index.json", "adapter_model.safetensors.index.json"):
        (adapter / name).write_text(json.dumps(index), encoding="utf-8")
    after = read_adapter(adapter, read_config(checkpoint))
    assert before.digest == after.digest
    assert all(
        np.array_equal(update.a, after.layers[layer][name].a) and np.array_equal(update.b, after.layers[layer][name].b)
        for layer, updates in before.layers.items()
        for name, update in updates.items()
    )
    (adapter / TENSORS).unlink()
    with pytest.raises(CheckpointError, match=f"{TENSORS}: missing"):
        read_adapter(adapter, read_config(checkpoint))


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
@pytest.mark.parametrize("inside", [True, False])
def test_no_link_is_followed(checkpoint: Path, adapter: Path, tmp_path: Path, name: str, inside: bool) -> None:
    elsewhere = (adapter if inside else tmp_path) / "elsewhere"
    (adapter / name).rename(elsewhere)
    (adapter / name).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=f"{name}: is a symbolic link; put the file itself there"):
        read_adapter(adapter, read_config(checkpoint))


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", [CONFIG, TENSORS])
def test_an_adapter_s_files_are_bounded_and_files(checkpoint: Path, adapter: Path, name: str) -> None:
    config = read_config(checkpoint)
    os.truncate(adapter / name, most_bytes(config) + 1)
    with pytest.raises(CheckpointError, match=f"{name}: has .* bytes, must have at most"):
        read_adapter(adapter, config)
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    with pytest.raises(CheckpointError, match=f"{name}: is no regular file"):
        read_adapter(adapter, config)


def test_the_largest_adapter_of_a_model_is_within_the_bound(checkpoint: Path, tmp_path: Path) -> None:
    config = read_config(checkpoint)
    folder = make_adapter(checkpoint, tmp_path, rank=min(512, config.width))
    assert read_files(folder, most_bytes(config)).contents[1].size <= most_bytes(config)


@pytest.mark.parametrize(
    "terms",
    [
        {"peft_type": SECRET},
        {"use_dora": [SECRET]},
        {"bias": SECRET},
        {"modules_to_save": [SECRET]},
        {"init_lora_weights": f"pissa {SECRET}"},
        {"lora_alpha": SECRET},
        {"alpha_pattern": SECRET},
        {"alpha_pattern": {SECRET: 1}},
        {"alpha_pattern": {"q_proj": SECRET}},
        {"alpha_pattern": {f"{SECRET} {number}": 1 for number in range(MOST_PATTERNS + 1)}},
        {"layer_replication": {SECRET: SECRET}},
    ],
)
def test_no_value_of_a_configuration_is_quoted(checkpoint: Path, adapter: Path, terms: dict[str, Any]) -> None:
    found = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    (adapter / CONFIG).write_text(json.dumps(found | terms), encoding="utf-8")
    refuse_without_quoting(checkpoint, adapter, next(iter(terms)).partition("_pattern")[0])


@pytest.mark.parametrize("content", [SECRET, f'["{SECRET}"]', f'{{"{SECRET}', b"\xff" + SECRET.encode()])
def test_no_content_of_a_malformed_configuration_is_quoted(
    checkpoint: Path, adapter: Path, content: str | bytes
) -> None:
    (adapter / CONFIG).write_bytes(content if isinstance(content, bytes) else content.encode())
    refuse_without_quoting(checkpoint, adapter, CONFIG)


@pytest.mark.parametrize(
    "name", [SECRET, f"base_model.model.{SECRET}.lora_A.weight", "base_model.model." + "staple" * 20 + ".lora_A.weight"]
)
def test_no_name_of_a_tensor_is_quoted_but_an_adapter_s(checkpoint: Path, adapter: Path, name: str) -> None:
    save_file({name: np.zeros(3, np.float32)}, adapter / TENSORS)
    refuse_without_quoting(checkpoint, adapter, TENSORS)


def refuse_without_quoting(checkpoint: Path, adapter: Path, named: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        read_adapter(adapter, read_config(checkpoint))
    assert str(adapter) in str(refused.value)
    assert named in str(refused.value)
    assert "staple" not in str(refused.value)
