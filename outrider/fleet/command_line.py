"""The command line of a server, and how one that is forked shows it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

MODULE = "outrider.cli"

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_START_CODE, _END_CODE, _START_STACK, _START_DATA, _END_DATA, _START_BRK = 26, 27, 28, 45, 46, 47  # of proc(5)'s stat
_ENV_START, _ENV_END = 50, 51
_SAME_PROGRAM = 0xFFFFFFFF << 32  # beside the size of an auxiliary vector that stays as it is: 0

_shown: list[ctypes.Array[ctypes.c_char]] = []  # the kernel reads it where it lies


def command_line(arguments: Sequence[str]) -> list[str]:
    """What runs `outrider ARGUMENTS` with the Python that runs here."""
    # -P: what lies in the current directory must not shadow our modules.
    return [sys.executable, "-P", "-m", MODULE, *arguments]


def show_command_line(arguments: Sequence[str]) -> None:
    """Has `ps` show it for this process, which was not started with it (Linux). Nothing happens where it cannot be."""
    said = b"".join(part.encode(errors="surrogateescape") + b"\0" for part in command_line(arguments))
    text = ctypes.create_string_buffer(said, len(said))
    begins = ctypes.addressof(text)
    stat = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()  # from the third field on
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    fields = [int(stat[number - 3]) for number in (_START_CODE, _END_CODE, _START_DATA, _END_DATA, _START_BRK)]
    fields += [libc.sbrk(0), int(stat[_START_STACK - 3]), begins, begins + len(said)]
    fields += [int(stat[number - 3]) for number in (_ENV_START, _ENV_END)]
    layout = (ctypes.c_uint64 * 13)(*fields, 0, _SAME_PROGRAM)  # struct prctl_mm_map
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(layout), ctypes.c_ulong(ctypes.sizeof(layout)), 0) == 0:
        _shown.append(text)
