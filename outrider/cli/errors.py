"""Error reports of commands: one message and an exit status, never a traceback for a user's mistake."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import InternalError, OutriderError
from outrider.rpc.lifecycle import USER_ERROR_STATUS

FAILURE = 1  # exit status of an error that the user cannot correct
INTERRUPTED = 130  # exit status that shells give for SIGINT


@contextmanager
def reported() -> Iterator[None]:
    """Print an OutriderError of the block to stderr and turn it into the exit status."""
    try:
        yield
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        raise SystemExit(FAILURE if isinstance(error, InternalError) else USER_ERROR_STATUS) from None
