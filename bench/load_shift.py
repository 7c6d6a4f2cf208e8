"""`python -m bench.load_shift`: compares gamma policies with rounds under a shifting load, on a real cluster.

The phases follow one another on the same cluster, one policy after the other, in an order that rotates. *Rounds* is
the usual form of speculation: a chain of gamma tokens is drafted for every text, and a step waits for all of them and
verifies all of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, cast

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.faults import FaultProxy
from bench.rows.cluster import BenchCluster, running
from bench.rows.engine_time import PAGE
from outrider.cli.command import parse_count, reported
from outrider.cli.performance.load import Load, apply_load, read_prompts
from outrider.cli.performance.simulate import parse_policy
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.core.session.contract import PolicyName
from outrider.rpc.lifecycle import run_until_signal

ROWS = ("off", "rounds:1", "rounds:2", "rounds:4", "rounds:8", "fixed:24", "ema", "goodput")
ANSWER = 64  # tokens
SEED = 2024
SLOTS = 12


@dataclass(frozen=True, slots=True)
class LoadPhase:
    """A period of steady traffic."""

    name: str
    callers: int
    temperature: float  # at 0 the texts of the small models are easy to predict, above it they are not
    round_trip_ms: float = 0.0


PHASES = (
    LoadPhase("idle", 1, 0.0),
    LoadPhase("burst", 8, 1.0),
    LoadPhase("easy, 5 ms", 2, 0.0, 5.0),
    LoadPhase("hard, 20 ms", 2, 1.0, 20.0),
    LoadPhase("hard, 50 ms", 1, 1.0, 50.0),
)

Speeds = dict[str, list[list[float]]]  # row -> repetition -> phase: tokens a second


def main(
    parameters: Annotated[str, typer.Option(help="Size to pad the target to.")] = "150M",
    seconds: Annotated[
        float, typer.Option(min=1, help="Measured seconds of each phase; half as many precede them.")
    ] = 16.0,
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policies, as for `outrider simulate`. [default: eight of them]")
    ] = None,
    models: Annotated[Path, typer.Option(help="Folder that holds target/ and drafter/.")] = Path("models"),
    texts: Annotated[Path, typer.Option(help="JSON lines with an id and a prompt.")] = Path("examples/held_out.jsonl"),
) -> None:
    """Measure goodput, in tokens a second, in every phase."""
    with reported(), TemporaryDirectory() as scratch:
        from tokenizers import Tokenizer

        from outrider.engine.checkpoints.padding import pad_checkpoint

        prompts = [text for _, text in read_prompts(texts, "#short")]
        target = Path(scratch) / "target"
        pad_checkpoint(models / "target", target, parameters=parse_count(parameters))
        tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        speeds: Speeds = defaultdict(list)
        tokens = [tuple(tokenizer.encode(text).ids) for text in prompts]
        run_until_signal(_measure(target, models / "drafter", tokens, policy or ROWS, seconds, repetitions, speeds))
    _print(speeds)
    print(last_line(speeds), flush=True)


async def _measure(
    target: Path,
    drafter: Path,
    prompts: Sequence[tuple[int, ...]],
    rows: Sequence[str],
    seconds: float,
    repetitions: int,
    speeds: Speeds,
) -> None:
    progress = Console(stderr=True, highlight=False)
    async with _cluster(target, drafter) as (cluster, proxy):
        for repetition in range(repetitions):
            for row in [*rows[repetition:], *rows[:repetition]]:
                policy, depth = parse_policy(row)
                speeds[row].append([])
                began, before = time.monotonic(), await _switches(cluster)
                for phase in PHASES:
                    progress.print(f"repetition {repetition + 1} of {repetitions}, {row}: {phase.name}")
                    proxy.delay_s = phase.round_trip_ms / 2000
                    drawn_from, seed = (phase.temperature,), SEED + repetition
                    load = Load(
                        prompts, phase.callers, seconds, seconds / 2, ANSWER, drawn_from, think_s=0.01, seed=seed
                    )
                    result = await apply_load(
                        cluster.client, load, speculation=cast(PolicyName, policy), depth=depth or None
                    )
                    speeds[row][-1].append(result.goodput)
                switches = await _switches(cluster) - before
                progress.print(f"{row}: {switches} changes of the usual arm in {time.monotonic() - began:.0f} s")


async def _switches(cluster: BenchCluster) -> int:
    """Return how often the verifier has changed its usual arm."""
    steering = (await cluster.control("verifier-0"))["steering"]
    return int(steering["switches"])


@asynccontextmanager
async def _cluster(target: Path, drafter: Path) -> AsyncIterator[tuple[BenchCluster, FaultProxy]]:
    """A router, a verifier on both cores, and a drafter behind a proxy."""
    async with FaultProxy("") as proxy:
        config = ClusterConfig(
            router=RouterConfig(listen="127.0.0.1:0", models={"target": target}),
            verifier=[VerifierConfig(model=target, name="target", threads=2, slots=SLOTS, metrics=PAGE["metrics"])],
            drafter=[DrafterConfig(model=drafter, slots=SLOTS, via=proxy.address)],
        )
        async with running(config) as cluster:
            proxy.target = cluster.verifier_address  # set before the first connection
            yield cluster, proxy


def last_line(speeds: Speeds) -> str:
    """Return the line for scripts: the goodput policy over the rounds with the best depth, and over no speculation in
    all phases and in the worst phase."""
    totals = {row: median(sum(phases) for phases in took) for row, took in speeds.items() if took}
    figures = {}
    if ours := speeds.get("goodput"):
        if rounds := [speed for row, speed in totals.items() if row.startswith("rounds:")]:
            figures["goodput_over_best_rounds"] = totals["goodput"] / max(rounds)
        if plain := speeds.get("off"):
            figures["goodput_over_off"] = totals["goodput"] / totals["off"]
            figures["goodput_over_off_at_worst"] = min(
                median(one[phase] / other[phase] for one, other in zip(ours, plain, strict=True))
                for phase in range(len(PHASES))
            )
    return " ".join(["shifting:", *(f"{name}={value:.2f}" for name, value in figures.items())])


def _print(speeds: Speeds) -> None:
    table = Table(box=SIMPLE, show_edge=False)
    table.add_column("tokens a second", no_wrap=True)
    for phase in PHASES:
        table.add_column(f"{phase.name}\n{phase.callers} at once", justify="right", no_wrap=True)
    table.add_column("mean", justify="right")
    for row, took in speeds.items():
        phases = [median(each[index] for each in took) for index in range(len(PHASES))]
        table.add_row(row, *(f"{speed:.1f}" for speed in phases), f"{sum(phases) / len(PHASES):.1f}")
    console = Console(highlight=False)
    console.width = max(100, console.width)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
