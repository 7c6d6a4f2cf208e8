"""A gateway in a process of its own, as `outrider gateway` starts it."""

from __future__ import annotations

import asyncio
import socket
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
    page: str  # URL of its metrics

    @property
    def peak_bytes(self) -> int:
        """The most memory that it has held since the last `forget_peak`."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024

    def forget_peak(self) -> int:
        """Measure the peak from now on. Return what it holds now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5", encoding="ascii")
        return self.peak_bytes


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@asynccontextmanager
async def gateway_process(router: str, *flags: str) -> AsyncIterator[GatewayProcess]:
    metrics = f"127.0.0.1:{_free_port()}"
    command = (sys.executable, "-m", "outrider.cli", "gateway", "--router", router, "--metrics", metrics)
    process = await asyncio.create_subprocess_exec(
        *command, "--listen", "127.0.0.1:0", *flags, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield GatewayProcess(
            (await process.stdout.readline()).decode().split()[-1], process.pid, f"http://{metrics}/metrics"
        )
    finally:
        process.terminate()
        await process.wait()
