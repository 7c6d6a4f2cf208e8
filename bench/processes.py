"""What the kernel says of a process, and where ours are started."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]


def peak_mb(pid: int) -> float:
    """The most memory that a process ever held (VmHWM), in 10^6 bytes; NaN where /proc does not say."""
    return _status_mb(pid, "VmHWM")


def resident_mb(pid: int) -> float:
    """The memory that a process holds now (VmRSS), in 10^6 bytes; NaN where /proc does not say."""
    return _status_mb(pid, "VmRSS")


def _status_mb(pid: int, field: str) -> float:
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024 / 1e6
    return float("nan")
