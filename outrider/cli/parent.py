"""Servers end with whoever started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from outrider.rpc.lifecycle import PARENT

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel to end this process with the one named in the environment, however that one dies."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before we asked
        raise SystemExit(1)
