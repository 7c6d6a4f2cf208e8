"""What was saved last outlives whatever happens to the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import CheckpointError, ConfigError
from outrider.training.saving.atomic_save import claimed, recover, replaced
from tests.full_disk import small_disk


def save(folder: Path, text: str) -> None:
    with replaced(folder) as new:
        (new / "said").write_text(text)


def test_a_saved_folder_replaces_the_last_one(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    save(folder, "first")
    (folder / "left").write_text("from before")
    save(folder, "second")
    assert [path.name for path in folder.iterdir()] == ["said"]
    assert (folder / "said").read_text() == "second"
    assert [path.name for path in folder.parent.iterdir()] == ["one"]


def test_a_failed_save_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    save(folder, "first")
    with pytest.raises(TypeError), replaced(folder) as new:
        (new / "said").write_text(1)  # type: ignore[arg-type]
    assert (folder / "said").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_full_disk_leaves_the_last_good_one_and_is_reported(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        save(disk / "one", "first")
        problem = "No space left on device.*make room there.*what was saved there last is intact"
        with pytest.raises(CheckpointError, match=problem), replaced(disk / "one") as new:
            save_file({"large": torch.zeros(1 << 20)}, new / "model.safetensors")
        with pytest.raises(CheckpointError, match=problem), replaced(disk / "one") as new:
            (new / "large").write_bytes(bytes(1 << 21))
        assert (disk / "one" / "said").read_text() == "first"
        save(disk / "one", "second")
        assert (disk / "one" / "said").read_text() == "second"


SAVING = """
import sys
from pathlib import Path
from outrider.training.saving.atomic_save import replaced
count = 0
while True:
    count += 1
    with replaced(Path(sys.argv[1])) as new:
        (new / "first").write_text(str(count))
        (new / "second").write_text(str(count))
    print(count, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_one(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    command = [sys.executable, "-c", SAVING, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        for kill in range(20):
            process.stdout.readline()
            time.sleep(0.0007 * kill)
            process.send_signal(signal.SIGSTOP)  # as if it were killed: what it has done is what is there
            seen = {path.name for path in tmp_path.iterdir()} & {"one", ".one.old"}
            assert seen, "neither the last nor the one before"
            process.send_signal(signal.SIGCONT)
        process.kill()
    recover(folder)
    assert (folder / "first").read_text() == (folder / "second").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / "file" / "one", "first")


def test_a_folder_is_one_training_s_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "drafter.run"
    with claimed(folder):
        with pytest.raises(ConfigError, match=f"output: {folder} is in use by another training"), claimed(folder):
            pass
        assert folder.exists()
    assert not folder.exists()
    with claimed(folder):
        (folder / "state").mkdir()
    assert [path.name for path in folder.iterdir()] == ["state"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"), claimed(tmp_path / "file" / "run"):
        pass
