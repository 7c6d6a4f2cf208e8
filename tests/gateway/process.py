"""A gateway in a process of its own, as `outrider gateway` starts it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GatewayProcess:
    """A running gateway."""

    address: str  # HOST:PORT
    pid: int

    @property
    def peak_bytes(self) -> int:
        """The most memory that it has held since the last `forget_peak`."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    def forget_peak(self) -> int:
        """Measure the peak from now on. Returns what it holds now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5", encoding="ascii")
        return self.peak_bytes


@asynccontextmanager
async def gateway_process(router: str, *flags: str) -> AsyncIterator[GatewayProcess]:
    command = (sys.executable, "-m", "outrider.cli", "gateway", "--router", router, "--listen", "127.0.0.1:0", *flags)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield GatewayProcess((await process.stdout.readline()).decode().split()[-1], process.pid)
    finally:
        process.terminate()
        await process.wait()
