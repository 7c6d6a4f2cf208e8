"""Runs one server with another clock, or as a version with another protocol would announce itself:

python -m tests.altered SKEW_S PROTOCOL ARGUMENT...     (the arguments of `outrider`; PROTOCOL 0: as it is)
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace

from outrider.core.session import protocol

OURS = ("outrider", "router", "verifier_svc", "drafter_svc")  # packages that have the other clock
SERVERS = ("router.server", "verifier_svc.server", "drafter_svc.server")


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    process: asyncio.subprocess.Process
    address: str

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def altered(redis_url: str, *arguments: str, skew_s: float = 0.0, version: int = 0) -> AsyncIterator[Server]:
    """Yield a server that listens."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.altered", str(skew_s), str(version), *arguments, "--listen", "127.0.0.1:0"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "REDIS_URL": redis_url},
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        yield (server := Server(process, line.split()[-1]))
    finally:
        await Server(process, "").kill()
    assert server


def main() -> None:
    skew_s, version = float(sys.argv.pop(1)), int(sys.argv.pop(1))
    if version:
        protocol.PROTOCOL, protocol.SPOKEN = version, frozenset({version})  # before anything imports them
    for server in SERVERS:
        importlib.import_module(server)
    skewed = SimpleNamespace(**vars(time) | {"time": lambda: time.time() + skew_s})
    for name, module in [*sys.modules.items()]:  # gRPC has to keep the system's clock
        if name.partition(".")[0] in OURS and getattr(module, "time", None) is time:
            module.time = skewed  # type: ignore[attr-defined]
    from outrider.cli.main import app

    app(prog_name="outrider")


if __name__ == "__main__":
    main()
