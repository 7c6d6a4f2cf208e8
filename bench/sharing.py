"""What sessions gain whose prompts begin alike: `python -m bench.sharing`.

- *First token*: a cluster of a verifier and a router, the target padded. A caller's session runs; then others ask with
  prompts as long, which begin as the running one's, or with a token of their own, in turn. Medians, and their ratio.
- *Memory*: bytes of KV that sessions hold in one engine, of which all begin alike, or none.

The last line: `sharing: first_token=… memory=…`, with sharing over without.
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

from outrider.cli.pad import parse_count
from outrider.cli.reporting import reported
from outrider.client import AsyncClient
from outrider.config import ClusterConfig, RouterConfig, VerifierConfig
from outrider.engine.batch import Segment
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.padding import pad_checkpoint
from outrider.engine.slots import Slots
from outrider.fleet.local import LocalCluster

VOCABULARY = 4096  # of the reference models
PROMPT, SHARED = 900, 800  # tokens of a prompt, and of it those that prompts have in common
TEXT, SESSIONS = 1000, 32  # of the memory's sessions


class FirstTokens(NamedTuple):
    """Seconds until the first token."""

    shared: list[float]  # of prompts that begin as a running session's
    alone: list[float]


def texts(length: int, shared: int, count: int, seed: int) -> list[list[int]]:
    """Texts of random tokens, with the first `shared` in common."""
    dice = np.random.default_rng(seed)
    beginning = dice.integers(1, VOCABULARY, shared).tolist()
    return [[*beginning, *dice.integers(1, VOCABULARY, length - shared).tolist()] for _ in range(count)]


async def first_tokens(target: Path, rounds: int, threads: int, prompt: int, shared: int) -> FirstTokens:
    """Of both kinds of prompts, in turn."""
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}),
        verifier=[VerifierConfig(model=target, name="target", threads=threads, slots=4)],
    )
    alike, others = texts(prompt, shared, rounds + 1, 1), texts(prompt, 0, rounds, 2)
    found = FirstTokens([], [])
    async with (
        LocalCluster(config) as cluster,
        AsyncClient(cluster.router_address) as client,
        _generating(client, alike[0]),  # it runs, and soon does not step: its caller reads no more
    ):
        for mine, alone in zip(alike[1:], others, strict=True):
            found.shared.append(await _first_token_s(client, mine))
            found.alone.append(await _first_token_s(client, alone))
    return found


@asynccontextmanager
async def _generating(client: AsyncClient, prompt: Sequence[int]) -> AsyncIterator[None]:
    """A session that has begun."""
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
    """Bytes of KV of sessions that begin alike, and of those that do not."""
    found = []
    for common in (shared, 0):
        engine = CpuEngine.load(target, dtype="bfloat16", slots=sessions, rows=length + 16, threads=threads)
        slots = Slots(sessions)
        for text in texts(length, common, sessions, 3):
            place = slots.take(text, "")
            if place.source is not None:
                engine.copy(place.source, place.slot, place.cached)
            rest = np.array(text[place.cached :])
            engine.forward([Segment(place.slot, place.cached, rest, np.arange(place.cached, length), None, 0)])
            slots.computed(place.slot, length - 1)
        found.append(engine.kv_bytes_taken)
    return found[0], found[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what sharing brings, and print it."""
    parser = argparse.ArgumentParser(prog="python -m bench.sharing", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters", default="150M", help="The target is padded to that many (150M).")
    parser.add_argument("--rounds", type=int, default=9, help="Prompts of each kind (9).")
    parser.add_argument("--threads", type=int, default=2, help="Of the verifier (2).")
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
