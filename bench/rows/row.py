"""The benchmark's rows: each generates in separate processes, which start once, take turns, and sleep when idle."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from bench.rows.processes import ROOT
from bench.rows.requests import BenchRequest, sample_from_json
from outrider.cli.performance.samples import Sample
from outrider.config import ClusterConfig
from outrider.errors import ConfigError, Unavailable
from outrider.rpc.lifecycle import USER_ERROR_STATUS

GRACE_S = 3.0  # between SIGTERM and SIGKILL of a worker
LONGEST_LINE = 2**24  # bytes
_LAST_LINES = 20

WORKERS = ("transformers", "assisted", "lookup", "in-process")


class BenchRow(Protocol):
    """An engine or configuration that generates texts."""

    name: str

    async def generate(self, request: BenchRequest) -> Sample:
        """Generate an answer; calls must not overlap. Raises Unavailable when the row's processes have ended."""

    def pids(self) -> Mapping[str, int]:
        """Return the row's processes, by name."""


class WorkerRow:
    """A row whose process is `bench.rows.worker`, or speaks its protocol."""

    def __init__(self, name: str, child: asyncio.subprocess.Process) -> None:
        self.name = name
        self._child = child
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._listening = asyncio.create_task(self._listen())

    async def generate(self, request: BenchRequest) -> Sample:
        """Generate an answer. Raises Unavailable with the worker's output when it ends instead."""
        return sample_from_json(await self.request(request.to_json()))

    async def request(self, line: str) -> bytes:
        """Send a line and return the worker's answer. Raises as `line` does."""
        assert self._child.stdin is not None
        with suppress(ConnectionError):  # `line` reports how the worker ended
            self._child.stdin.write(f"{line}\n".encode())
            await self._child.stdin.drain()
        return await self.line()

    def pids(self) -> Mapping[str, int]:
        """Return the worker's process."""
        return {"worker": self._child.pid}

    async def line(self) -> bytes:
        """Return the worker's next line. Raises ConfigError or Unavailable when it ends instead."""
        assert self._child.stdout is not None
        if line := await self._child.stdout.readline():
            return line
        status = await self._child.wait()
        await self._listening
        printed = "\n".join(self._last_lines)
        if status == USER_ERROR_STATUS:
            raise ConfigError(f"{self.name}: {printed.rpartition('outrider: ')[2]}")
        raise Unavailable(f"the row {self.name} ended with status {status}; its output:\n{printed}")

    async def stop(self) -> None:
        """End the worker in any state."""
        with suppress(ProcessLookupError):
            self._child.terminate()
        try:
            await asyncio.wait_for(self._child.wait(), GRACE_S)
        except TimeoutError:
            self._child.kill()
            await self._child.wait()
        await self._listening

    async def _listen(self) -> None:
        assert self._child.stderr is not None
        async for line in self._child.stderr:
            self._last_lines.append(line.decode(errors="replace").rstrip())


@dataclass(frozen=True, slots=True)
class Models:
    """The models that a worker loads."""

    target: Path
    drafter: Path
    dtype: Literal["float32", "bfloat16"]
    threads: int


@asynccontextmanager
async def worker_row(name: str, models: Models, config: ClusterConfig, *more: str) -> AsyncIterator[WorkerRow]:
    """Start a worker and wait until it has loaded. Raises ConfigError or Unavailable with its output."""
    command = (
        *(sys.executable, "-m", "bench.rows.worker", name),
        *("--target", str(models.target.resolve()), "--drafter", str(models.drafter.resolve())),
        *("--dtype", models.dtype, "--threads", str(models.threads)),
        *("--cluster", config.model_dump_json()),
        *more,
    )
    async with worker(name, *command, environment=os.environ) as row:
        await row.line()
        yield row


@asynccontextmanager
async def worker(name: str, *command: str, environment: Mapping[str, str]) -> AsyncIterator[WorkerRow]:
    """Start a process that answers lines, and end it after the block. Its first line means that it has loaded."""
    child = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**environment, "COLUMNS": "200"},
        limit=LONGEST_LINE,
        start_new_session=True,  # a Ctrl-C reaches only this process, which stops the others in order
    )
    row = WorkerRow(name, child)
    try:
        yield row
    finally:
        await row.stop()
