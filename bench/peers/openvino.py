"""OpenVINO GenAI as a peer: installed in an environment of its own, `build/openvino`, and its rows."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench.rows.processes import ROOT, output
from bench.rows.row import WorkerRow, worker

VERSION = "2026.4.1.0"  # of openvino-genai
FOLDER = ROOT / "build" / "openvino"
WORKER = Path(__file__).with_name("openvino_worker.py")


async def install(folder: Path = FOLDER) -> None:
    """Install it, unless this version is there already. Raises Unavailable with what failed."""
    stamp = folder / "version"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == VERSION:
        return
    what = "OpenVINO: cannot be installed"
    await output(what, sys.executable, "-m", "venv", "--clear", str(folder))
    await output(what, str(folder / "bin" / "pip"), "--quiet", "install", f"openvino-genai=={VERSION}")
    stamp.write_text(VERSION, encoding="utf-8")


@asynccontextmanager
async def openvino_rows(target: Path, threads: int, folder: Path = FOLDER) -> AsyncIterator[list[WorkerRow]]:
    """Start a process for plain decoding of a GGUF file and one for prompt lookup, and wait until they have loaded.

    Raises Unavailable when a process ends.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = (str(folder / "bin" / "python"), "-P", str(WORKER), "--target", str(target), "--threads", str(threads))
    async with AsyncExitStack() as stack:
        rows = []
        for name, more in (("OpenVINO", ()), ("OpenVINO, prompt lookup", ("--lookup",))):
            started = await stack.enter_async_context(worker(name, *command, *more, environment=environment))
            await started.line()
            rows.append(started)
        yield rows
