"""Runs commands in the checkout, and reads the memory of processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from outrider.errors import Unavailable

ROOT = Path(__file__).parents[2]
LAST_LINES = 5


async def output(failure: str, *command: str, environment: Mapping[str, str] | None = None) -> bytes:
    """Return the output of a command. Raises Unavailable with `failure` and the last lines of its stderr."""
    child = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        printed, complaints = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        last = "\n".join(complaints.decode(errors="replace").splitlines()[-LAST_LINES:])
        raise Unavailable(f"{failure}:\n{last}")
    return printed


def peak_mb(pid: int) -> float:
    """Return the peak memory of a process (VmHWM), in 10^6 bytes; NaN if /proc does not have it."""
    return _status_mb(pid, "VmHWM")


def resident_mb(pid: int) -> float:
    """Return the current memory of a process (VmRSS), in 10^6 bytes; NaN if /proc does not have it."""
    return _status_mb(pid, "VmRSS")


def _status_mb(pid: int, field: str) -> float:
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024 / 1e6
    return float("nan")
