"""A drafter that dials a router, as somebody starts it on a laptop."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from tests.e2e.conftest import MODELS

STARTS_S, ENDS_S = 60, 15


@dataclass
class Laptop:
    """The process of a drafter, and what it has printed."""

    process: asyncio.subprocess.Process
    printed: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.printed.append(line.decode())


@asynccontextmanager
async def dialed(
    router: str, *flags: str, key: str = "", ca: str = "", inside: Sequence[str] = ()
) -> AsyncIterator[Laptop]:
    """A drafter that the router has listed. `inside`: a command that runs it somewhere. Raises EOFError, with what it
    has printed, where it ends instead."""
    command = (sys.executable, "-P", "-m", "outrider.cli", "drafter", "--model", str(MODELS / "drafter"))
    process = await asyncio.create_subprocess_exec(
        *(*inside, *command, "--dtype", "float32", "--slots", "4", "--threads", "1", "--connect", router, *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"OUTRIDER_API_KEY": key, "OUTRIDER_CA": ca},
    )
    laptop = Laptop(process)
    reading = asyncio.create_task(laptop.read())
    try:
        async with asyncio.timeout(STARTS_S):
            while not any("listening on" in line for line in laptop.printed):
                if reading.done():
                    raise EOFError("".join(laptop.printed))
                await asyncio.sleep(0.05)
        yield laptop
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), ENDS_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        await reading
        print("".join(laptop.printed))
