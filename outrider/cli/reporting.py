"""How commands speak: errors as one message and an exit status, never a traceback for a user's mistake."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import InternalError, OutriderError
from outrider.rpc.lifecycle import MISTAKE

FAILURE = 1  # the user cannot
INTERRUPTED = 130  # as shells say it of SIGINT


@contextmanager
def reported() -> Iterator[None]:
    """Around a command: its OutriderErrors go to stderr and become the exit status."""
    try:
        yield
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        raise SystemExit(FAILURE if isinstance(error, InternalError) else MISTAKE) from None
