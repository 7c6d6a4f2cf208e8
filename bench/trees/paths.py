"""The logits of a model after paths of tokens below a position in a text; each row is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path as File
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.masks import path_mask
from outrider.engine.interface.settings import EngineSettings

Path = tuple[int, ...]
Logits = NDArray[np.float32]  # [vocabulary]

SCRATCH = 6144  # KV rows for the paths below one root
ROWS = 96  # of one pass
UNBOUNDED = 2**31


def load(folder: File) -> CpuEngine:
    """Load a model for one text at a time, in float32, on one thread."""
    return CpuEngine.load(folder, EngineSettings(dtype="float32", slots=1, rows=1024 + SCRATCH, threads=1))


class TextRows(Protocol):
    """A model, or heads, over one text at a time."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens in a row of logits."""

    @property
    def depth(self) -> int:
        """Largest number of tokens below a root that the model guesses."""

    def read(self, text: Sequence[int]) -> object:
        """Read a text."""

    def root(self, position: int) -> None:
        """Let paths begin after the text's token at `position` from now on."""

    def after(self, path: Path) -> Logits:
        """Return the logits after one path, which is shorter than `depth`."""

    def fetch(self, paths: Iterable[Path]) -> None:
        """Compute the missing rows of these paths and their prefixes, in as few passes as possible."""


class PathRows:
    """One model over one text.

    Roots must be visited from the last to the first: the KV of paths below a root overwrites that of the text after it.
    """

    def __init__(self, engine: CpuEngine) -> None:
        self._engine = engine
        self._text: Sequence[int] = ()
        self._root = 0
        self._rows: dict[Path, Logits] = {}
        self._places: dict[Path, int] = {}  # KV row, counted after the root's prefix

    @property
    def vocabulary(self) -> int:
        """Number of tokens in a row of logits."""
        return self._engine.vocabulary

    @property
    def depth(self) -> int:
        """A model has no limit."""
        return UNBOUNDED

    def read(self, text: Sequence[int]) -> NDArray[np.float32]:
        """Read a text. Return the logits after each of its tokens: [tokens, vocabulary]."""
        self._text = text
        count = len(text)
        return self._engine.forward([Segment(0, 0, np.array(text, np.int64), np.arange(count, dtype=np.int64))])

    def root(self, position: int) -> None:
        """Let paths begin after the text's token at `position` from now on."""
        self._root = position
        self._rows.clear()
        self._places.clear()

    def after(self, path: Path) -> Logits:
        """Return the logits after one path."""
        if path not in self._rows:
            self.fetch([path])
        return self._rows[path]

    def fetch(self, paths: Iterable[Path]) -> None:
        """Compute the missing rows of these paths and their prefixes, in as few passes as possible."""
        missing = {path[:end] for path in paths for end in range(len(path) + 1)} - self._rows.keys()
        ordered = sorted(missing, key=lambda path: (len(path), path))
        for first in range(0, len(ordered), ROWS):
            self._run(ordered[first : first + ROWS])

    def _run(self, paths: Sequence[Path]) -> None:
        held = len(self._places)
        for place, path in enumerate(paths, held):
            self._places[path] = place
        rows = [[self._places[path[:end]] for end in range(len(path) + 1)] for path in paths]
        mask = path_mask(rows, held + len(paths))
        tokens = np.array([path[-1] if path else self._text[self._root] for path in paths], np.int64)
        positions = np.array([self._root + len(path) for path in paths], np.int64)
        logits = self._engine.forward([Segment(0, self._root, tokens, positions, mask)])
        self._rows.update(zip(paths, logits, strict=True))


def continued(rows: TextRows, prompt: Sequence[int], contract: Contract, count: int) -> list[int]:
    """Return a prompt with the target's next `count` tokens under shared noise."""
    text = list(prompt)
    sampler = Sampler(contract, rows.vocabulary, text, len(text))
    rows.read(text)
    rows.root(len(text) - 1)
    path: Path = ()
    for _ in range(count):
        path = (*path, sampler.choose(rows.after(path), path).token)
    return [*text, *path]
