"""`python -m bench.adapters`: what low-rank adapters cost, in passes of eight texts and while they are loaded.

- *Passes*: eight texts, a row each, in one pass of the engine, without adapters, with one, and with four of which each
  has two texts; in turn, and the medians' ratios of tokens per second.
- *Loading*: a cluster with eight callers; the longest time between two chunks of an answer while adapters are loaded,
  and while none is.

The last line: `adapters: one=… four=… gap_ms=… usual_gap_ms=…`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer

from bench.low_rank_files import make_adapter
from bench.options import padded_model
from outrider.cli.command import parse_count, reported
from outrider.client import AsyncClient
from outrider.config import ClusterConfig, RouterConfig, VerifierConfig
from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.settings import EngineSettings
from outrider.fleet.cluster import LocalCluster
from outrider.rpc.lifecycle import run_until_signal

TEXTS = 8
ADAPTERS = 4
CONTEXT = 200  # tokens of each text
ROUNDS = 60  # passes of each kind
LOADS = 5
PAUSE_S = 1.0  # before each load, with as long a time in which none is loaded


@dataclass
class PassSeconds:
    """Seconds of passes over a row of each text."""

    none: list[float] = field(default_factory=list)
    one: list[float] = field(default_factory=list)
    four: list[float] = field(default_factory=list)


@dataclass
class Gaps:
    """The longest gap between chunks, in seconds, of each time in which adapters were loaded, or none was."""

    loading: list[float] = field(default_factory=list)
    usual: list[float] = field(default_factory=list)


def measure_passes(target: Path, folders: Sequence[Path], threads: int, rounds: int = ROUNDS) -> PassSeconds:
    """Measure passes without adapters, with one, and with all, in turn."""
    engine = CpuEngine.load(target, EngineSettings(dtype="bfloat16", slots=TEXTS, rows=CONTEXT + 16, threads=threads))
    adapters = [engine.load_adapter(folder)[0] for folder in folders]
    of_texts: dict[str, list[object]] = {
        "none": [None] * TEXTS,
        "one": [adapters[0]] * TEXTS,
        "four": [adapters[slot % len(adapters)] for slot in range(TEXTS)],
    }
    for slot in range(TEXTS):
        tokens = np.zeros(CONTEXT, np.int64)
        engine.forward([Segment(slot, 0, tokens, np.arange(CONTEXT), None, 0)])
    found = PassSeconds()
    for number in range(rounds + 1):
        for name, chosen in of_texts.items():
            row = np.zeros(1, np.int64)
            segments = [
                Segment(slot, CONTEXT, row, np.full(1, CONTEXT), None, 1, adapter)
                for slot, adapter in enumerate(chosen)
            ]
            began = time.perf_counter()
            engine.forward(segments)
            if number:  # the first round allocates
                getattr(found, name).append(time.perf_counter() - began)
    return found


async def measure_loading(
    target: Path, adapters: Path, names: Sequence[str], threads: int, loads: int = LOADS, ranks: int = 1
) -> Gaps:
    """Measure gaps between chunks of eight callers while adapters are loaded, and while none is."""
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}, adapter_loaders=("*",)),
        verifier=[
            VerifierConfig(
                model=target,
                name="target",
                threads=threads,
                tensor_parallel=ranks,
                slots=TEXTS,
                adapters=adapters,
                max_adapters=1,
            )
        ],
    )
    gaps = Gaps()
    async with LocalCluster(config) as cluster, AsyncClient(cluster.router_address) as client:
        longest, last = 0.0, [0.0] * TEXTS

        async def call(number: int) -> None:
            nonlocal longest
            while True:
                stream = client.stream("def ", max_tokens=400, ignore_eos=True, seed=number, speculation="off")
                last[number] = 0.0
                async for _ in stream:
                    now = time.perf_counter()
                    if last[number]:
                        longest = max(longest, now - last[number])
                    last[number] = now

        callers = [asyncio.create_task(call(number)) for number in range(TEXTS)]

        async def longest_gap(*beside: Awaitable[object]) -> float:
            """Return the longest gap in a pause or longer, until there is one."""
            nonlocal longest
            longest = 0.0
            await asyncio.gather(asyncio.sleep(PAUSE_S), *beside)
            while not longest and not any(caller.done() for caller in callers):
                await asyncio.sleep(PAUSE_S / 10)
            return longest

        await asyncio.sleep(2 * PAUSE_S)
        for number in range(loads):
            name = names[number % len(names)]
            gaps.usual.append(await longest_gap())
            gaps.loading.append(await longest_gap(client.load_adapter(name, name)))
        for caller in callers:
            caller.cancel()
        for caller in callers:
            with suppress(asyncio.CancelledError):
                await caller
    return gaps


def last_line(passes: PassSeconds, gaps: Gaps) -> str:
    """Return the line for scripts: ratios of tokens per second over no adapter, and the median of the longest gaps."""
    none = median(passes.none)
    return (
        f"adapters: one={none / median(passes.one):.2f} four={none / median(passes.four):.2f} "
        f"gap_ms={median(gaps.loading) * 1e3:.0f} usual_gap_ms={median(gaps.usual) * 1e3:.0f}"
    )


def main(
    parameters: Annotated[str, typer.Option(help="Size to pad the target to.")] = "150M",
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the verifier, or of each of its ranks.")] = 2,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the verifier. Passes are measured on one.")] = 1,
    models: Annotated[Path, typer.Option(help="Folder that holds target/.")] = Path("models"),
) -> None:
    """Measure what adapters cost."""
    found: list[tuple[PassSeconds, Gaps]] = []

    async def measure() -> None:
        with TemporaryDirectory(prefix="outrider-bench-") as scratch:
            async with padded_model(models / "target", parse_count(parameters)) as target:
                config = read_config(target)
                folders = [make_adapter(Path(scratch) / f"a{seed}", config, rank, seed) for seed in range(ADAPTERS)]
                passes = measure_passes(target, folders, threads)
                names = [folder.name for folder in folders]
                found.append((passes, await measure_loading(target, Path(scratch), names, threads, ranks=ranks)))

    with reported():
        run_until_signal(measure())
    ((passes, gaps),) = found
    for name in ("none", "one", "four"):
        print(f"a pass of {TEXTS} rows, adapters: {name}: {median(getattr(passes, name)) * 1e3:.2f} ms")
    print(last_line(passes, gaps), flush=True)


if __name__ == "__main__":
    typer.run(main)
