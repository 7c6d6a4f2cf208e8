"""Files of checkpoints are read into memory, bounded: whatever becomes of them meanwhile is an error and no signal."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from outrider.engine.checkpoints.checkpoint import Weights, read_config, read_json
from outrider.engine.checkpoints.files import CheckpointFile, ReadFile, read_file
from outrider.engine.checkpoints.model_card import weights_digest
from outrider.engine.checkpoints.stored_tensors import StoredTensors, safetensors_layout
from outrider.errors import CheckpointError

SECRET = "correct horse battery staple"
MATRIX = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({"a": MATRIX}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_tensor_outlives_its_file(file: Path) -> None:
    """In a process of its own: a page of a memory map beyond the end of a file ends the process with SIGBUS."""
    script = f"""
import os
from pathlib import Path
from outrider.engine.checkpoints.checkpoint import Weights
whole = Weights(Path({str(file.parent)!r})).array("a", 1024, 1024)
part = Weights(Path({str(file.parent)!r})).array("a", 1024, 1024, rows=slice(5, 7), columns=slice(3, 9))
os.truncate({str(file)!r}, 0)
print(whole.sum(), part.sum())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(MATRIX.sum()), str(MATRIX[5:7, 3:9].sum())]


def truncate(file: Path) -> None:
    os.truncate(file, 1000)


def rewrite(file: Path) -> None:
    content = file.read_bytes()
    with file.open("r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(1, 1))


def replace(file: Path) -> None:
    shutil.copy(file, file.with_name("other"))
    file.with_name("other").replace(file)


@pytest.mark.parametrize("change", [truncate, rewrite, replace, os.remove])
def test_a_file_that_changes_between_two_reads_is_named(change: Callable[[Path], None], file: Path) -> None:
    weights = Weights(file.parent)
    assert np.array_equal(weights.array("a", 1024, 1024), MATRIX)
    change(file)
    with pytest.raises(CheckpointError, match=f"{file}: (has changed while it was read|missing)"):
        weights.array("a", 1024, 1024)


@pytest.mark.timeout(10)
def test_a_path_that_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="no regular file"):
        read_config(tmp_path)
    (tmp_path / "zeros").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="no regular file"):
        read_json(tmp_path / "zeros")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="no regular file"):
        CheckpointFile(tmp_path / "folder")


def test_a_file_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=f"has {1 << 40} bytes, must have at most"):
        read_config(tmp_path)
    assert read_file(Path(__file__), 1 << 20).content.tobytes() == Path(__file__).read_bytes()


@pytest.mark.parametrize("header", [0, 7, (1 << 64) - 1, 1 << 40, 17 << 20])
def test_a_header_is_bounded_before_it_is_read(header: int, tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as sparse:
        sparse.write(header.to_bytes(8, "little"))
        sparse.truncate(1 << 30)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or corrupt"):
        Weights(tmp_path)


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"a":' * 100_000])
def test_json_without_end_is_an_error_of_the_file(nested: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(nested, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "."])
def test_an_index_names_files_of_its_own_folder_alone(name: str, file: Path) -> None:
    folder = file.parent / "checkpoint"
    folder.mkdir()
    index = {"weight_map": {"a": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map .* in its own folder"):
        Weights(folder)


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "header",
    [
        SECRET,
        f'["{SECRET}"]',
        f'{{"{SECRET}": 1}}',
        json.dumps({SECRET: ENTRY | {"dtype": SECRET}}),
        json.dumps({SECRET: ENTRY | {"shape": [SECRET]}}),
        json.dumps({SECRET: ENTRY | {"shape": [True]}}),
        json.dumps({SECRET: ENTRY | {"shape": [1 << 70]}}),
        json.dumps({SECRET: ENTRY | {"shape": [2]}}),
        json.dumps({SECRET: ENTRY | {"data_offsets": [4, 8]}}),
        json.dumps({SECRET: ENTRY | {"data_offsets": [4, 0]}}),
        json.dumps({SECRET: ENTRY | {"data_offsets": [0, 4, SECRET]}}),
        json.dumps({SECRET: ENTRY, "b": ENTRY}),
        json.dumps({}),
    ],
)
def test_the_error_of_a_damaged_header_quotes_none_of_its_bytes(header: str, tmp_path: Path) -> None:
    content = len(header).to_bytes(8, "little") + header.encode() + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or corrupt") as refused:
        Weights(tmp_path)
    assert SECRET not in str(refused.value)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_tensors_of_a_damaged_file_lie_inside_it(file: Path, data: st.DataObject) -> None:
    save_file({"a": np.arange(3.0), "b": np.zeros((2, 0), np.float16), "c": np.arange(5, dtype=np.int8)}, file)
    content = bytearray(file.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[at] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789"[]{},:'))
    content = content[: data.draw(st.sampled_from([len(content), len(content) - 1, 100, 9, 8, 3, 0]))]
    read = ReadFile(file, np.frombuffer(bytes(content), np.uint8))
    found = 0
    with suppress(CheckpointError):
        weights = StoredTensors(safetensors_layout([read]), file)
        found = sum(sum(map(len, weights.row_bytes(name)[2])) for name in weights.files)
    assert found <= len(content)


def test_the_digest_of_weights_is_of_their_first_middle_and_last_rows(file: Path) -> None:
    (file.parent / "config.json").write_text("{}", encoding="utf-8")
    digests = {weights_digest(file.parent)}
    for row in (0, 512, 1023, 7):
        save_file({"a": np.where(np.arange(1024)[:, None] == row, -1, MATRIX).astype(np.float32)}, file)
        digests.add(weights_digest(file.parent))
    assert len(digests) == 4
