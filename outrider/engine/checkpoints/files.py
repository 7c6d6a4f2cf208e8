"""Reads files of checkpoints into memory; never by a memory map: a file that shrinks would end the process."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import CheckpointError


class _State(NamedTuple):
    """Which file it is, and its last change."""

    device: int
    inode: int
    size: int
    changed_ns: int


class CheckpointFile:
    """A regular file as it is when this is made: a read is of that content, or raises CheckpointError."""

    def __init__(self, path: Path, *, links: bool = True) -> None:
        """`links`: the path may be a symbolic link, as in the cache of a hub. Raises CheckpointError."""
        self.path = path
        self._flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
        with self._opened() as (_, state):
            self._state = state
        self.size = self._state.size

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return bytes [start, stop). Raises CheckpointError where the file has changed since this was made."""
        content = np.empty(stop - start, np.uint8)
        with self.opened() as file:
            done = 0
            while done < len(content):
                if not (more := os.preadv(file, [content[done:].data], start + done)):
                    raise self._changed()
                done += more
        return content

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a descriptor. Raises CheckpointError where the file has changed since this was made, or does."""
        with self._opened() as (file, state):
            self._check(state)
            try:
                yield file
            finally:
                self._check(_state(file))

    @contextmanager
    def _opened(self) -> Iterator[tuple[int, _State]]:
        """Yield the file's descriptor and state. Raises CheckpointError, for each error of the body, too."""
        try:
            file = os.open(self.path, self._flags)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise CheckpointError(f"{self.path}: is no regular file; put the checkpoint's own file there")
                yield file, _state(file)
            finally:
                os.close(file)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: missing; download the checkpoint again, all of its files") from None
        except OSError as error:
            if not self._flags & os.O_NOFOLLOW or not self.path.is_symlink():
                raise CheckpointError(f"{self.path}: {error.strerror or error}") from None
            raise CheckpointError(f"{self.path}: is a symbolic link; put the file itself there") from None

    def _check(self, state: _State) -> None:
        if state != self._state:
            raise self._changed()

    def _changed(self) -> CheckpointError:
        return CheckpointError(f"{self.path}: has changed while it was read; load it again")


class ReadFile(NamedTuple):
    """A file that has been read: the content stays as it was, whatever becomes of the file."""

    path: Path
    content: NDArray[np.uint8]

    @property
    def size(self) -> int:
        """Bytes of the content."""
        return len(self.content)

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return a view of bytes [start, stop)."""
        return self.content[start:stop]


Content = CheckpointFile | ReadFile


def read_file(path: Path, most: int, *, links: bool = True) -> ReadFile:
    """Read a file of at most `most` bytes. `links`: see `CheckpointFile`. Raises CheckpointError."""
    file = CheckpointFile(path, links=links)
    if file.size > most:
        raise CheckpointError(f"{path}: has {file.size} bytes, must have at most {most}")
    return ReadFile(path, file.read(0, file.size))


def _state(file: int) -> _State:
    found = os.fstat(file)
    return _State(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
