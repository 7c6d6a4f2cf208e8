"""Quantizes weights to blocks of GGUF's types, in compiled code."""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from outrider.engine.checkpoints.block_types import TYPES
from outrider.engine.cpu import missing
from outrider.errors import ConfigError

PARTS = 16  # of a weight, shared by threads


def quantized(kind: str, rows: NDArray[np.float32], pool: Executor) -> NDArray[np.uint8]:
    """Return the blocks of finite rows: [rows, bytes of a row]. Raises ConfigError without the compiled code."""
    if reason := missing():
        raise ConfigError(f"quantizing needs the compiled kernels: {reason}")
    from outrider._native import quantize

    found = np.empty((len(rows), TYPES[kind].row_bytes(rows.shape[1])), np.uint8)
    parts = [part for part in np.array_split(np.arange(len(rows)), PARTS) if len(part)]

    def work(part: NDArray[np.int64]) -> None:
        own = slice(part[0], part[-1] + 1)
        quantize(kind, rows[own], found[own])

    list(pool.map(work, parts))
    return found
