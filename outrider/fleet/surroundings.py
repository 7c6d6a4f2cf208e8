"""What the libraries under a server are told before they load: how threads wait, and what they share."""

from __future__ import annotations

import ctypes
import os
import sys

# A thread that waits spins first: waking it takes 50 microseconds, at each of a hundred operations of a pass (measured
# on two cores: a pass of 27 ms instead of 12). It must not spin for long, or it takes the core from others on this
# machine; GNU's default of about 4 ms does. About 0.1 ms outlasts what lies between two operations.
SPINS = "10000"

_M_ARENA_MAX = -8  # of glibc's mallopt


def settle(threads: int) -> None:
    """Settles it for this process. What the environment says already, stays."""
    os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # its handlers abort, now and then, what Ray forks
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if "MALLOC_ARENA_MAX" not in os.environ:
        _share_one_heap()


def _share_one_heap() -> None:
    """With a heap for each thread, what one allocates and another frees leaves holes in all of them: a drafter's memory
    rose for minutes under short sessions, by 1 MB a second at first. With one it levels off within the first half."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # not every C library has it
        libc.mallopt(_M_ARENA_MAX, 1)
