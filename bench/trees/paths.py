"""What a model says after paths of tokens below a place in a text; each row is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path as File
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.contract import Contract
from outrider.core.sampler import Sampler
from outrider.engine.batch import Segment
from outrider.engine.native import NativeEngine

Path = tuple[int, ...]
Logits = NDArray[np.float32]  # [vocabulary]

SCRATCH = 6144  # rows below one root
ROWS = 96  # of one pass
UNBOUNDED = 2**31


def load(folder: File) -> NativeEngine:
    """A model for one text at a time, in float32, on one thread."""
    return NativeEngine.load(folder, dtype="float32", slots=1, rows=1024 + SCRATCH, threads=1)


class Rows(Protocol):
    """A model, or heads, over one text at a time."""

    @property
    def vocabulary(self) -> int:
        """Tokens of a row."""

    @property
    def depth(self) -> int:
        """Tokens below a root that it guesses at most."""

    def read(self, text: Sequence[int]) -> object:
        """Takes a text."""

    def root(self, position: int) -> None:
        """From now on, paths begin behind the text's token at `position`."""

    def after(self, path: Path) -> Logits:
        """The logits after one path, which is shorter than `depth`."""

    def fetch(self, paths: Iterable[Path]) -> None:
        """Computes what is missing of these paths, and of what leads to them, in as few passes as hold it."""


class PathRows:
    """One model over one text. Roots must be visited from the last to the first: what is below one overwrites the text
    behind it."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._text: Sequence[int] = ()
        self._root = 0
        self._rows: dict[Path, Logits] = {}
        self._places: dict[Path, int] = {}  # cache row behind the root's prefix

    @property
    def vocabulary(self) -> int:
        """Tokens of a row."""
        return self._engine.vocabulary

    @property
    def depth(self) -> int:
        """There is no end to it."""
        return UNBOUNDED

    def read(self, text: Sequence[int]) -> NDArray[np.float32]:
        """Takes a text. Gives the logits after each of its tokens: [tokens, vocabulary]."""
        self._text = text
        count = len(text)
        return self._engine.forward([Segment(0, 0, np.array(text, np.int64), np.arange(count, dtype=np.int64))])

    def root(self, position: int) -> None:
        """From now on, paths begin behind the text's token at `position`."""
        self._root = position
        self._rows.clear()
        self._places.clear()

    def after(self, path: Path) -> Logits:
        """The logits after one path."""
        if path not in self._rows:
            self.fetch([path])
        return self._rows[path]

    def fetch(self, paths: Iterable[Path]) -> None:
        """Computes what is missing of these paths, and of what leads to them, in as few passes as hold it."""
        missing = {path[:end] for path in paths for end in range(len(path) + 1)} - self._rows.keys()
        ordered = sorted(missing, key=lambda path: (len(path), path))
        for first in range(0, len(ordered), ROWS):
            self._run(ordered[first : first + ROWS])

    def _run(self, paths: Sequence[Path]) -> None:
        held, count = len(self._places), len(paths)
        for place, path in enumerate(paths, held):
            self._places[path] = place
        mask = np.zeros((count, held + count), np.bool_)
        for row, path in enumerate(paths):
            mask[row, [self._places[path[:end]] for end in range(len(path) + 1)]] = True
        tokens = np.array([path[-1] if path else self._text[self._root] for path in paths], np.int64)
        positions = np.array([self._root + len(path) for path in paths], np.int64)
        logits = self._engine.forward([Segment(0, self._root, tokens, positions, mask)])
        self._rows.update(zip(paths, logits, strict=True))


def continued(rows: Rows, prompt: Sequence[int], contract: Contract, count: int) -> list[int]:
    """The target's own text after a prompt under shared noise, prompt included."""
    text = list(prompt)
    sampler = Sampler(contract, rows.vocabulary, text, len(text))
    rows.read(text)
    rows.root(len(text) - 1)
    path: Path = ()
    for _ in range(count):
        path = (*path, sampler.choose(rows.after(path), path).token)
    return [*text, *path]
