"""How torch's threads wait for one another, which must be settled before torch loads."""

from __future__ import annotations

import os

# A thread that waits spins first: waking it takes 50 microseconds, at each of a hundred operations of a pass (measured
# on two cores: a pass of 27 ms instead of 12). It must not spin for long, or it takes the core from others on this
# machine; GNU's default of about 4 ms does. About 0.1 ms outlasts what lies between two operations.
SPINS = "10000"


def settle(threads: int) -> None:
    """Settles it for this process. What the environment says already, stays."""
    os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
