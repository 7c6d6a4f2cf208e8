"""The logits of heads on the target after paths below a position in a text, like `paths.PathRows` for a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path as File

import numpy as np
import torch

from bench.trees.paths import Logits, Path
from outrider.engine.checkpoints.checkpoint import read_json
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.heads.config import KEY, read_heads_config
from outrider.engine.heads.loading import load_speculator
from outrider.engine.heads.speculator import HeadNodes, HeadRoot, KeptFeatures
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.settings import EngineSettings

MAX_TOKENS = 1024  # of a text


def are_heads(folder: File) -> bool:
    """Return whether a folder holds heads on a target instead of a model. Raises CheckpointError."""
    return KEY in read_json(folder / "config.json")


class HeadRows:
    """Heads over one text at a time. Roots may be visited in any order."""

    def __init__(self, target: File, heads: File) -> None:
        """Load target and heads. Raises the errors of loading, and ConfigError for heads of another target."""
        features = read_heads_config(heads).features
        self._speculator = load_speculator(heads, target, precise=True, slots=1, context=MAX_TOKENS)
        self._engine = CpuEngine.load(
            target, EngineSettings(dtype="float32", slots=1, rows=MAX_TOKENS, threads=1, features=features)
        )
        self._text: Sequence[int] = ()
        self._features = torch.empty(0)
        self._root = 0
        self._rows: dict[Path, tuple[int, Logits]] = {}  # row number in the speculator's round, and logits

    @property
    def vocabulary(self) -> int:
        """Number of tokens in a row of logits."""
        return self._engine.vocabulary

    @property
    def depth(self) -> int:
        """Number of tokens below a root that the heads guess."""
        return self._speculator.depth

    def read(self, text: Sequence[int]) -> None:
        """Let the target read a text."""
        self._text = text
        count = len(text)
        self._engine.forward([Segment(0, 0, np.array(text, np.int64), np.arange(count, dtype=np.int64))])
        self._features = self._engine.hidden().clone()
        self._speculator.open_slot(0, None, 0)
        self._speculator.add_features(self._features, [KeptFeatures(0, 0, range(count), text)])

    def root(self, position: int) -> None:
        """Let paths begin after the text's token at `position`, which must be 1 or more: heads need a feature before
        it."""
        self._root = position
        self._rows.clear()

    def after(self, path: Path) -> Logits:
        """Return the logits after one path, which is shorter than `depth`."""
        if path not in self._rows:
            self.fetch([path])
        return self._rows[path][1]

    def fetch(self, paths: Iterable[Path]) -> None:
        """Compute the missing rows of these paths and their prefixes, level by level."""
        missing = {path[:end] for path in paths for end in range(len(path) + 1)} - self._rows.keys()
        for length in sorted({len(path) for path in missing}):
            level = [path for path in missing if len(path) == length]
            if not length:
                self._begin()
                continue
            logits = self._speculator.expand([HeadNodes(self._rows[path[:-1]][0], path[-1]) for path in level])
            first = len(self._rows)
            self._rows.update(
                (path, (first + at, row.logits)) for at, (path, row) in enumerate(zip(level, logits, strict=True))
            )

    def _begin(self) -> None:
        latest = self._root - 1
        kept = KeptFeatures(0, latest, [latest], self._text[latest : self._root + 1])
        self._speculator.add_features(self._features, [kept])
        row = None
        while row is None:  # a long text is read in parts
            (row,), _ = self._speculator.begin([HeadRoot(0, self._text[: self._root + 1])])
        self._rows[()] = 0, row.logits
