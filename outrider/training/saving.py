"""Folders that appear complete or not at all: what was saved last stays until the next is on the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from outrider.errors import CheckpointError, ConfigError


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `folder` at the end of the block, when all of it is on the disk.

    Where the block raises or the process ends before that, `folder` is as it was, for whoever calls `recover` first.
    Raises CheckpointError when the disk is full or must not be written.
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


def refuse_to_replace(folder: Path) -> None:
    """Raises ConfigError for what is there already: a first save would take its place."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder}: is there already, and of no training that could go on; give another --output")


def recover(folder: Path) -> None:
    """Puts what was saved last in its place again, if its replacement broke off, and removes what is left of that."""
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
