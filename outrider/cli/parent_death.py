"""Ends a server when the process that started it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from outrider.rpc.lifecycle import PARENT

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Make the kernel kill this process when the parent process that the environment names ends, even if it is killed.

    Does nothing where the environment names none, and on systems other than Linux.
    """
    parent = os.environ.pop(PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # the parent ended before the call of prctl
        raise SystemExit(1)
