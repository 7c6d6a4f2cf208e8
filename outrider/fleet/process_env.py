"""Environment variables for native libraries, set before they load: how threads wait, and how they share memory."""

from __future__ import annotations

import ctypes
import os
import sys

# A waiting thread spins before it sleeps: waking it takes 50 microseconds, at each of a hundred operations of a pass
# (measured on two cores: a pass of 27 ms instead of 12). A long spin takes the core from other processes; GNU's default
# is about 4 ms. This value, about 0.1 ms, is longer than the time between two operations.
SPINS = "10000"

_M_ARENA_MAX = -8  # of glibc's mallopt


def set_variables(threads: int) -> None:
    """Set the variables for this process. Except the numbers of threads, variables that are set already stay."""
    os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # its fork handlers sometimes abort processes that Ray forks
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if "MALLOC_ARENA_MAX" not in os.environ:
        _share_one_heap()


def _share_one_heap() -> None:
    """Make all threads allocate from one heap (glibc).

    With a heap for each thread, blocks that one thread allocates and another frees fragment all heaps: a drafter's
    memory grew for minutes under short sessions, by 1 MB a second at first. With one heap it stops growing in the
    first half of that time.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # some C libraries do not have it
        libc.mallopt(_M_ARENA_MAX, 1)
