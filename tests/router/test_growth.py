"""A router keeps next to nothing of sessions that have ended, be it Python's memory or that of libraries."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
# Each read of a gRPC call that is cancelled loses 80 bytes (grpc/grpc#43360): where a call is broken off, up to four in
# the router, its caller and the scripted verifier, which are one process here.
GRPC_BYTES = 200  # a session, of all ways to end
RUNS = [  # how sessions end, how many in a batch, batches, and the bytes that a session may leave
    pytest.param("ended", 120, 7, 200, id="ended"),
    pytest.param("all", 700, 9, 200 + GRPC_BYTES, id="all", marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
]
FIRST = 2  # batches after which pools and tables have their size


def slope(figures: list[int], each: int) -> float:
    """What the figures grow by in one of `each` steps: the median of the slopes between all pairs (Theil and Sen)."""
    return median((b - a) / ((j - i) * each) for (i, a), (j, b) in combinations(enumerate(figures), 2))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc tells what malloc has handed out")
@pytest.mark.parametrize(("ways", "sessions", "batches", "most"), RUNS)
def test_a_session_leaves_next_to_nothing(ways: str, sessions: int, batches: int, most: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.router.growing", ways, str(sessions), str(batches)],
        cwd=ROOT,
        env={**os.environ, "PYTHONMALLOC": "malloc"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = list(map(int, done.stdout.split()))[FIRST:]
    print(f"{slope(figures, sessions):.0f} bytes a session", figures)
    assert slope(figures, sessions) <= most, figures


def test_a_slope_is_that_of_most_pairs() -> None:  # bites: of the measurement itself
    assert slope([1000, 1200, 9000, 1600, 1800], 2) == 100
