"""Optional rows of other engines, from checkouts named on the command line; and the row of llama.cpp's server."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.rows.processes import output
from bench.rows.requests import BenchRequest
from bench.rows.row import BenchRow, Models
from outrider.cli.performance.samples import Sample
from outrider.errors import ConfigError, Unavailable

START_S = 120.0
CONTEXT = 1024  # the reference models'

# The files that a peer's checkout must contain.
NEEDED = {
    "llama-server": ("build/bin/llama-server", "convert_hf_to_gguf.py"),
    "gpt-fast": ("model.py", "generate.py"),
}


def parse_peers(entries: Sequence[str]) -> dict[str, Path]:
    """Parse NAME=PATH entries into checkouts by peer. Raises ConfigError for an unknown peer or a missing file."""
    peers: dict[str, Path] = {}
    for entry in entries:
        name, _, folder = entry.partition("=")
        if name not in NEEDED or not folder:
            raise ConfigError(f"--peer: is {entry!r}, must be NAME=PATH, where NAME is one of {', '.join(NEEDED)}")
        for needed in NEEDED[name]:
            if not (Path(folder) / needed).is_file():
                raise ConfigError(f"--peer: {name} is not there: {Path(folder) / needed} does not exist")
        peers[name] = Path(folder).resolve()
    return peers


@dataclass(slots=True)
class LlamaServer:
    """llama.cpp's server with the target in GGUF, called over HTTP."""

    name: str
    port: int
    child: asyncio.subprocess.Process

    def pids(self) -> Mapping[str, int]:
        """Return the server's process."""
        return {"server": self.child.pid}

    async def generate(self, request: BenchRequest) -> Sample:
        """Stream a completion. The sampler's noise is llama.cpp's, so a seeded text differs from that of our rows."""
        began = time.perf_counter()
        body = {
            "prompt": list(request.prompt),
            "n_predict": request.max_tokens,
            "temperature": request.temperature,
            "samplers": ["temperature"],
            "seed": request.seed % 2**32,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }
        tokens: list[int] = []
        arrivals: list[float] = []
        async for line in self._post(body):
            event = json.loads(line)
            tokens += event.get("tokens", ())
            arrivals += [time.perf_counter() - began] * len(event.get("tokens", ()))
        if len(tokens) < request.max_tokens:
            raise Unavailable(f"{self.name} generated {len(tokens)} tokens instead of {request.max_tokens}")
        return Sample(tuple(tokens), tuple(arrivals), len(tokens))

    async def healthy(self) -> bool:
        """Return whether the server has loaded its model."""
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            status = await reader.readline()
            writer.close()
            return b" 200 " in status
        return False

    async def _post(self, body: Mapping[str, object]) -> AsyncIterator[bytes]:
        """Send a request and yield the events of its answer."""
        content = json.dumps(body).encode()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(
                b"POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
            )
            async for line in reader:
                if line.startswith(b"data: {"):
                    yield line.removeprefix(b"data: ")
            writer.close()
        except OSError as error:
            raise Unavailable(f"{self.name} does not answer: {error}") from None


@asynccontextmanager
async def llama_server_row(name: str, checkout: Path, models: Models) -> AsyncIterator[BenchRow]:
    """Convert the target with the peer's converter and start its server. Raises Unavailable with the output."""
    converted = models.target / "target.gguf"
    kind = {"bfloat16": "bf16", "float32": "f32"}[models.dtype]
    converter = str(checkout / "convert_hf_to_gguf.py")
    convert = (sys.executable, converter, str(models.target), "--outtype", kind, "--outfile", str(converted))
    await output(f"{name}: cannot convert the target", *convert)
    port = _free_port()
    child = await asyncio.create_subprocess_exec(
        *(str(checkout / "build/bin/llama-server"), "--model", str(converted), "--port", str(port)),
        *("--threads", str(models.threads), "--parallel", "1", "--ctx-size", str(CONTEXT)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        server = LlamaServer(name, port, child)
        give_up = time.monotonic() + START_S
        while not await server.healthy():
            if child.returncode is not None or time.monotonic() > give_up:
                raise Unavailable(f"{name}: its server did not start with {converted}")
            await asyncio.sleep(0.1)
        yield server
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
