"""How far logits lie from those of the dequantized model, over several texts.

`python -m bench.engine.gaps THREADS FILE FOLDER`: FOLDER has texts.json, lists of token ids, and the logits that other
engines had after each token, ENGINE-NUMBER.npy. It adds ours, and writes a line for each engine: its name, and the mean
and the widest gap of one logit in each text.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from bench.engine.passes import OURS
from outrider.cli.command import reported
from outrider.fleet import process_env

TEXTS = "texts.json"


class LogitGap(NamedTuple):
    """The gaps of an engine's logits, by text."""

    engine: str
    mean: tuple[float, ...]
    widest: tuple[float, ...]

    def __str__(self) -> str:
        """Return the gaps over all texts."""
        return f"{self.engine}: mean {fmean(self.mean):.3f}, widest {max(self.widest):.2f}"


def logits_file(folder: Path, engine: str, number: int) -> Path:
    """Return the file of an engine's logits of a text."""
    return folder / f"{engine}-{number}.npy"


def measure_gaps(threads: int, file: Path, folder: Path) -> Iterator[LogitGap]:
    """Yield the gaps of all engines that have logits in the folder, and of ours."""
    from outrider.cli.verification.reference import Reference
    from outrider.engine.interface.batch import Segment
    from outrider.engine.loading import load_engine

    texts: list[list[int]] = json.loads((folder / TEXTS).read_text(encoding="utf-8"))
    engine, exact = load_engine(file, dtype="auto", slots=1, threads=threads), Reference(file, threads=threads)
    for number, text in enumerate(texts):
        rows = np.arange(len(text))
        np.save(logits_file(folder, OURS, number), engine.forward([Segment(0, 0, np.array(text), rows)]))
    expected = [exact.logits(text[:1], [*text[1:], 0]) for text in texts]
    for name in sorted({path.stem.rpartition("-")[0] for path in folder.glob("*.npy")}):
        gaps = [np.abs(np.load(logits_file(folder, name, number)) - it) for number, it in enumerate(expected)]
        yield LogitGap(name, tuple(float(it.mean()) for it in gaps), tuple(float(it.max()) for it in gaps))


if __name__ == "__main__":
    process_env.set_variables(int(sys.argv[1]))
    with reported():
        for found in measure_gaps(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])):
            print(json.dumps(found), flush=True)
