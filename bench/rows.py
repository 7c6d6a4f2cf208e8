"""The rows: ways to generate, each in processes of its own, started once and asked in turn. Idle, they sleep."""

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

from bench.asking import Ask, sample_from_json
from bench.processes import ROOT
from outrider.cli.samples import Sample
from outrider.config import ClusterConfig
from outrider.errors import ConfigError, Unavailable
from outrider.rpc.lifecycle import MISTAKE

GRACE_S = 3.0  # for a worker that was asked to end
LONGEST_LINE = 2**24  # bytes
_LAST_LINES = 20

WORKERS = ("transformers", "assisted", "lookup", "in-process")


class Row(Protocol):
    """One way to generate."""

    name: str

    async def generate(self, ask: Ask) -> Sample:
        """Answers; one call at a time. Raises Unavailable when its processes have ended."""

    def pids(self) -> Mapping[str, int]:
        """Its processes, by what they are."""


class WorkerRow:
    """A row behind `bench.worker`."""

    def __init__(self, name: str, child: asyncio.subprocess.Process) -> None:
        self.name = name
        self._child = child
        self._said: deque[str] = deque(maxlen=_LAST_LINES)
        self._listening = asyncio.create_task(self._listen())

    async def generate(self, ask: Ask) -> Sample:
        """Answers. Raises Unavailable with what the worker said when it ends instead."""
        return sample_from_json(await self.request(ask.to_json()))

    async def request(self, line: str) -> bytes:
        """Send a line and return the worker's answer. Raises as `line` does."""
        assert self._child.stdin is not None
        with suppress(ConnectionError):  # reading says how it ended
            self._child.stdin.write(f"{line}\n".encode())
            await self._child.stdin.drain()
        return await self.line()

    def pids(self) -> Mapping[str, int]:
        """The worker."""
        return {"worker": self._child.pid}

    async def line(self) -> bytes:
        """The worker's next line. Raises ConfigError or Unavailable when it ends instead."""
        assert self._child.stdout is not None
        if line := await self._child.stdout.readline():
            return line
        status = await self._child.wait()
        await self._listening
        said = "\n".join(self._said)
        if status == MISTAKE:
            raise ConfigError(f"{self.name}: {said.rpartition('outrider: ')[2]}")
        raise Unavailable(f"the row {self.name} ended with status {status}; it said:\n{said}")

    async def stop(self) -> None:
        """Ends the worker, in whatever state it is."""
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
            self._said.append(line.decode(errors="replace").rstrip())


@dataclass(frozen=True, slots=True)
class Models:
    """What a worker loads."""

    target: Path
    drafter: Path
    dtype: Literal["float32", "bfloat16"]
    threads: int


@asynccontextmanager
async def worker_row(name: str, models: Models, config: ClusterConfig, *more: str) -> AsyncIterator[WorkerRow]:
    """Starts a worker and waits until it has loaded. Raises ConfigError or Unavailable with what it said."""
    command = (
        *(sys.executable, "-m", "bench.worker", name),
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
    """Starts a process that answers lines, and ends it. Its first line says that it has loaded."""
    child = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**environment, "COLUMNS": "200"},
        limit=LONGEST_LINE,
        start_new_session=True,  # a Ctrl-C reaches us alone; we stop the others in order
    )
    row = WorkerRow(name, child)
    try:
        yield row
    finally:
        await row.stop()
