"""The command line of a server, and how a forked server shows it in `ps`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

MODULE = "outrider.cli"

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_START_CODE, _END_CODE, _START_STACK, _START_DATA, _END_DATA, _START_BRK = 26, 27, 28, 45, 46, 47  # of proc(5)'s stat
_ENV_START, _ENV_END = 50, 51
_SAME_PROGRAM = 0xFFFFFFFF << 32  # no new executable; the low half, 0, is the size of an unchanged auxiliary vector

_shown: list[ctypes.Array[ctypes.c_char]] = []  # keeps the buffer alive, because the kernel reads it in place


def command_line(arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs `outrider ARGUMENTS` with this process's Python."""
    # -P: files in the current directory must not shadow our modules.
    return [sys.executable, "-P", "-m", MODULE, *arguments]


def show_command_line(arguments: Sequence[str]) -> None:
    """Make `ps` show this command line for a process that was started with another one (Linux).

    Do nothing if the kernel refuses the change. The package setproctitle would show one argument with spaces in it,
    and change the name by which `pgrep` finds the process.
    """
    encoded = b"".join(part.encode(errors="surrogateescape") + b"\0" for part in command_line(arguments))
    text = ctypes.create_string_buffer(encoded, len(encoded))
    begins = ctypes.addressof(text)
    stat = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()  # from the third field on
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    fields = [int(stat[number - 3]) for number in (_START_CODE, _END_CODE, _START_DATA, _END_DATA, _START_BRK)]
    fields += [libc.sbrk(0), int(stat[_START_STACK - 3]), begins, begins + len(encoded)]
    fields += [int(stat[number - 3]) for number in (_ENV_START, _ENV_END)]
    layout = (ctypes.c_uint64 * 13)(*fields, 0, _SAME_PROGRAM)  # struct prctl_mm_map
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(layout), ctypes.c_ulong(ctypes.sizeof(layout)), 0) == 0:
        _shown.append(text)
