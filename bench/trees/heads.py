"""What heads on the target say after paths below a place in a text, as `paths.PathRows` for a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path as File

import numpy as np
import torch

from bench.trees.paths import Logits, Path
from outrider.engine.batch import Segment
from outrider.engine.checkpoint import read_json
from outrider.engine.heads.loading import load_speculator
from outrider.engine.heads.shape import KEY, read_shape
from outrider.engine.heads.speculator import Drafted, Root
from outrider.engine.native import NativeEngine

MOST = 1024  # tokens of a text


def are_heads(folder: File) -> bool:
    """Whether a checkpoint's folder holds heads on a target, and no model. Raises CheckpointError."""
    return KEY in read_json(folder / "config.json")


class HeadRows:
    """Heads over one text at a time. Roots may be visited in any order."""

    def __init__(self, target: File, heads: File) -> None:
        """Raises as loading does, and ConfigError for heads that are not for that target."""
        features = read_shape(heads).features
        self._speculator = load_speculator(heads, target, precise=True, slots=1, context=MOST)
        self._engine = NativeEngine.load(target, dtype="float32", slots=1, rows=MOST, threads=1, features=features)
        self._text: Sequence[int] = ()
        self._features = torch.empty(0)
        self._root = 0
        self._rows: dict[Path, tuple[int, Logits]] = {}  # with their numbers in the round

    @property
    def vocabulary(self) -> int:
        """Tokens of a row."""
        return self._engine.vocabulary

    @property
    def depth(self) -> int:
        """Tokens below a root that they guess."""
        return self._speculator.depth

    def read(self, text: Sequence[int]) -> None:
        """Has the target read a text."""
        self._text = text
        count = len(text)
        self._engine.forward([Segment(0, 0, np.array(text, np.int64), np.arange(count, dtype=np.int64))])
        self._features = self._engine.hidden().clone()
        self._speculator.take(0, None, 0)
        self._speculator.keep(0, 0, self._features)

    def root(self, position: int) -> None:
        """From now on, paths begin behind the text's token at `position`, 1 or more: before it nothing is known."""
        self._root = position
        self._rows.clear()

    def after(self, path: Path) -> Logits:
        """The logits after one path, which is shorter than `depth`."""
        if path not in self._rows:
            self.fetch([path])
        return self._rows[path][1]

    def fetch(self, paths: Iterable[Path]) -> None:
        """Computes what is missing of these paths, and of what leads to them, level by level."""
        missing = {path[:end] for path in paths for end in range(len(path) + 1)} - self._rows.keys()
        for length in sorted({len(path) for path in missing}):
            level = [path for path in missing if len(path) == length]
            if not length:
                self._begin()
                continue
            said = self._speculator.expand([Drafted(self._rows[path[:-1]][0], path[-1]) for path in level])
            first = len(self._rows)
            self._rows.update((path, (first + at, row)) for at, (path, row) in enumerate(zip(level, said, strict=True)))

    def _begin(self) -> None:
        latest = self._root - 1
        self._speculator.keep(0, latest, self._features[latest : self._root])
        said = None
        while said is None:  # a long text is read in parts
            (said,) = self._speculator.begin([Root(0, self._text[: self._root + 1])])
        self._rows[()] = 0, said
