"""`python -m bench.shifting`: gamma policies under a load that shifts, on a real cluster, against rounds.

The phases follow one another on the same cluster, one policy after the other, in an order that rotates. *Rounds* is
speculation as it is usually built: a chain of gamma tokens is drafted for every text, a step waits for all of them and
verifies them all.
"""

from __future__ import annotations

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

from bench.cluster import Cluster, running
from bench.faults import FaultProxy
from outrider.cli.load import Load, carry, read_prompts
from outrider.cli.pad import parse_count
from outrider.cli.reporting import reported
from outrider.cli.simulate import checked
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.core.contract import PolicyName
from outrider.rpc.lifecycle import run_until_signal

ROWS = ("off", "rounds:1", "rounds:2", "rounds:4", "rounds:8", "fixed:24", "ema", "goodput")
ANSWER = 64  # tokens
SEED = 2024
SLOTS = 12


@dataclass(frozen=True, slots=True)
class Phase:
    """Some time of steady traffic."""

    name: str
    callers: int
    temperature: float  # greedy texts of the small models are easy to guess, others are not
    round_trip_ms: float = 0.0


PHASES = (
    Phase("idle", 1, 0.0),
    Phase("burst", 8, 1.0),
    Phase("easy, 5 ms", 2, 0.0, 5.0),
    Phase("hard, 20 ms", 2, 1.0, 20.0),
    Phase("hard, 50 ms", 1, 1.0, 50.0),
)

Speeds = dict[str, list[list[float]]]  # row -> repetition -> phase: tokens a second


def main(
    parameters: Annotated[str, typer.Option(help="The target is padded to that many.")] = "150M",
    seconds: Annotated[float, typer.Option(min=1, help="Of each phase that count; half as many before them.")] = 16.0,
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
    policy: Annotated[list[str] | None, typer.Option(help="As of `outrider simulate`. [default: some]")] = None,
    models: Annotated[Path, typer.Option(help="Folder that holds target/ and drafter/.")] = Path("models"),
    texts: Annotated[Path, typer.Option(help="JSON lines with an id and a prompt.")] = Path("examples/held_out.jsonl"),
) -> None:
    """Measure goodput, in tokens a second, in every phase."""
    with reported(), TemporaryDirectory() as scratch:
        from tokenizers import Tokenizer

        from outrider.engine.padding import pad_checkpoint

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
                policy, depth = checked(row)
                speeds[row].append([])
                for phase in PHASES:
                    progress.print(f"repetition {repetition + 1} of {repetitions}, {row}: {phase.name}")
                    proxy.delay_s = phase.round_trip_ms / 2000
                    heat, seed = (phase.temperature,), SEED + repetition
                    load = Load(prompts, phase.callers, seconds, seconds / 2, ANSWER, heat, think_s=0.01, seed=seed)
                    carried = await carry(
                        cluster.client, load, speculation=cast(PolicyName, policy), depth=depth or None
                    )
                    speeds[row][-1].append(carried.goodput)


@asynccontextmanager
async def _cluster(target: Path, drafter: Path) -> AsyncIterator[tuple[Cluster, FaultProxy]]:
    """A router, a verifier on both cores, and a drafter behind a proxy."""
    async with FaultProxy("") as proxy:
        config = ClusterConfig(
            router=RouterConfig(listen="127.0.0.1:0", models={"target": target}),
            verifier=[VerifierConfig(model=target, name="target", threads=2, slots=SLOTS)],
            drafter=[DrafterConfig(model=drafter, slots=SLOTS, via=proxy.address)],
        )
        async with running(config) as cluster:
            proxy.target = cluster.verifier_address  # nobody has connected yet
            yield cluster, proxy


def last_line(speeds: Speeds) -> str:
    """The line for scripts: goodput over the rounds whose depth was best over all phases, over off in all phases and in
    the worst."""
    whole = {row: median(sum(phases) for phases in took) for row, took in speeds.items() if took}
    figures = {}
    if ours := speeds.get("goodput"):
        rounds = [speed for row, speed in whole.items() if row.startswith("rounds:")]
        figures["goodput_over_best_rounds"] = whole["goodput"] / max(rounds)
        if plain := speeds.get("off"):
            figures["goodput_over_off"] = whole["goodput"] / whole["off"]
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
