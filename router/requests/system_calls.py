"""Takes from a process all that it could do beside computing: files, connections, other processes, signals.

A filter of seccomp (Linux, Documentation/userspace-api/seccomp_filter.rst) looks at the number of each system call. All
but those that a computation in Python needs fail with EPERM, for good.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Sequence

# Of each machine: the number by which the kernel knows it (linux/audit.h), and its numbers of write, close, mmap,
# mprotect, munmap, mremap, brk, madvise, rt_sigreturn, gettimeofday, clock_gettime, getrandom, exit and exit_group.
_MACHINES = {
    "x86_64": (0xC000003E, (1, 3, 9, 10, 11, 25, 12, 28, 15, 96, 228, 318, 60, 231)),
    "aarch64": (0xC00000B7, (64, 57, 222, 226, 215, 216, 214, 233, 139, 169, 113, 278, 93, 94)),
}
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # instructions
_NUMBER_AT, _MACHINE_AT = 0, 4  # bytes in what a filter looks at
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000 | errno.EPERM


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def only_compute() -> None:
    """Have all system calls of this thread fail from now on but those that a computation needs. Raises OSError where
    that cannot be had."""
    if (found := _MACHINES.get(platform.machine())) is None:
        raise OSError(f"system calls cannot be forbidden on {platform.machine()}")
    instructions = _filter(*found)
    program = _Program(len(instructions), (_Instruction * len(instructions))(*instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(f"system calls cannot be forbidden: {os.strerror(ctypes.get_errno())}")


def _filter(machine: int, allowed: Sequence[int]) -> list[_Instruction]:
    """Return a program that allows these system calls, by their numbers on a machine."""
    looks = [
        _Instruction(_IF_EQUAL, len(allowed) - place, 0, number)  # over the others and what fails
        for place, number in enumerate(allowed)
    ]
    return [
        _Instruction(_LOAD, 0, 0, _MACHINE_AT),
        _Instruction(_IF_EQUAL, 0, len(allowed) + 1, machine),  # a program may have other numbers beside these
        _Instruction(_LOAD, 0, 0, _NUMBER_AT),
        *looks,
        _Instruction(_RETURN, 0, 0, _FAIL),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    ]
