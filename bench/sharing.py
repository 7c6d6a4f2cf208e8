"""The gain of sessions whose prompts share a prefix: `python -m bench.sharing`.

- *First token*: a cluster of a verifier and a router, with the target padded. One session runs; then others with
  prompts of the same length start, which in turn begin like the running one or differ from the first token on. Medians,
  and their ratio.
- *Memory*: bytes of KV that sessions hold in one engine, if all share a prefix, or none do.

The last line: `sharing: first_token=… memory=…`, the ratios with sharing over without.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from rich.console import Console

from outrider.cli.command import parse_count, reported
from outrider.client import AsyncClient
from outrider.config import ClusterConfig, RouterConfig, VerifierConfig
from outrider.engine.checkpoints.padding import pad_checkpoint
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.kv.kv_slots import KvSlots
from outrider.fleet.cluster import LocalCluster

VOCABULARY = 4096  # of the reference models
PROMPT, SHARED = 900, 800  # tokens of a prompt, and of the shared prefix
TEXT, SESSIONS = 1000, 32  # tokens and number of the sessions whose memory is measured


class FirstTokens(NamedTuple):
    """Seconds until the first token."""

    shared: list[float]  # of prompts that begin like that of a running session
    alone: list[float]


def texts(length: int, shared: int, count: int, seed: int) -> list[list[int]]:
    """Return texts of random tokens that share the first `shared` tokens."""
    random = np.random.default_rng(seed)
    beginning = random.integers(1, VOCABULARY, shared).tolist()
    return [[*beginning, *random.integers(1, VOCABULARY, length - shared).tolist()] for _ in range(count)]


async def first_tokens(target: Path, rounds: int, threads: int, prompt: int, shared: int) -> FirstTokens:
    """Measure first tokens of both kinds of prompts, in turn."""
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}),
        verifier=[VerifierConfig(model=target, name="target", threads=threads, slots=4)],
    )
    alike, others = texts(prompt, shared, rounds + 1, 1), texts(prompt, 0, rounds, 2)
    found = FirstTokens([], [])
    async with (
        LocalCluster(config) as cluster,
        AsyncClient(cluster.router_address) as client,
        _generating(client, alike[0]),  # it stops stepping soon, because its caller does not read
    ):
        for mine, alone in zip(alike[1:], others, strict=True):
            found.shared.append(await _first_token_s(client, mine))
            found.alone.append(await _first_token_s(client, alone))
    return found


@asynccontextmanager
async def _generating(client: AsyncClient, prompt: Sequence[int]) -> AsyncIterator[None]:
    """Run a session within the block, from its first chunk on."""
    stream = client.stream(prompt, max_tokens=100, ignore_eos=True, speculation="off", timeout=600)
    chunks = aiter(stream)
    await anext(chunks)
    yield
    await client.cancel(stream.session_id)


async def _first_token_s(client: AsyncClient, prompt: Sequence[int]) -> float:
    began = time.perf_counter()
    await client.generate(prompt, max_tokens=1, ignore_eos=True, speculation="off", timeout=600)
    return time.perf_counter() - began


def memory(target: Path, threads: int, sessions: int, length: int, shared: int) -> tuple[int, int]:
    """Return the bytes of KV of sessions that share a prefix, and of sessions that do not."""
    found = []
    for common in (shared, 0):
        engine = CpuEngine.load(
            target, EngineSettings(dtype="bfloat16", slots=sessions, rows=length + 16, threads=threads)
        )
        slots = KvSlots(sessions)
        for text in texts(length, common, sessions, 3):
            place = slots.acquire(text, "")
            if place.source is not None:
                engine.copy(place.source, place.slot, place.cached)
            rest = np.array(text[place.cached :])
            engine.forward([Segment(place.slot, place.cached, rest, np.arange(place.cached, length), None, 0)])
            slots.mark_computed(place.slot, length - 1)
        found.append(engine.kv_bytes_taken)
    return found[0], found[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the gain of shared prefixes, and print it."""
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", default="150M", help="Size to pad the target to (150M).")
    parser.add_argument("--rounds", type=int, default=9, help="Prompts of each kind (9).")
    parser.add_argument("--threads", type=int, default=2, help="Threads of the verifier (2).")
    parser.add_argument("--models", type=Path, default=Path("models"), help="Folder that holds target/ and drafter/.")
    options = parser.parse_args(arguments)
    screen = Console()
    with reported(), TemporaryDirectory(prefix="outrider-bench-") as scratch:
        target = Path(scratch) / "target"
        pad_checkpoint(options.models / "target", target, parameters=parse_count(options.parameters))
        found = asyncio.run(first_tokens(target, options.rounds, options.threads, PROMPT, SHARED))
        held, apart = memory(options.models / "drafter", options.threads, SESSIONS, TEXT, SHARED)
    shared_ms, alone_ms = median(found.shared) * 1e3, median(found.alone) * 1e3
    ratio = median(mine / alone for mine, alone in zip(*found, strict=True))
    screen.print(
        f"first token of {PROMPT} tokens, {options.parameters}: {alone_ms:.0f} ms; with {SHARED} of them shared with a "
        f"running session {shared_ms:.0f} ms"
    )
    screen.print(
        f"KV of {SESSIONS} sessions of {TEXT} tokens: {apart / 1e6:.0f} MB; with {SHARED} of them in common "
        f"{held / 1e6:.0f} MB (the drafter's model)"
    )
    print(f"sharing: first_token={ratio:.2f} memory={held / apart:.2f}")


if __name__ == "__main__":
    main()
