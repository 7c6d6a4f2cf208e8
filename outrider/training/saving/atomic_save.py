"""Atomic saves of folders: the previous content stays until the new content is completely on the disk."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from outrider.errors import CheckpointError, ConfigError


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` at the end of the block, once its files are on the disk.

    If the block raises or the process ends before, `folder` keeps its content, after a call of `recover`. Raises
    CheckpointError when the disk is full or cannot be written.
    """
    new, old = _beside(folder)
    try:
        recover(folder)
        new.mkdir(parents=True)
        yield new
        for path in (*new.rglob("*"), new):
            _sync(path)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        kept = "; what was saved there last is intact" if folder.exists() or old.exists() else ""
        raise CheckpointError(
            f"{folder}: cannot be written: {problem}; make room there, and run the same command again{kept}"
        ) from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
        recover(folder)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold other processes off a training's folder in the body. One that stays empty is removed.

    Raises ConfigError while another process has it, CheckpointError where the folder cannot be made.
    """
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("wb")
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"output: {folder} is in use by another training; let it end, or give another") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with suppress(OSError):
                folder.rmdir()


def refuse_to_replace(folder: Path) -> None:
    """Raise ConfigError if the folder exists and is not empty, because a first save would replace it."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder}: is there already, and of no training that could go on; give another --output")


def recover(folder: Path) -> None:
    """Restore the previous content if a replacement was interrupted, and remove the incomplete new content."""
    new, old = _beside(folder)
    shutil.rmtree(new, ignore_errors=True)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
