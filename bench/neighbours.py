"""`python -m bench.neighbours`: a busy verifier and one with a single caller, each with a router and a drafter.

Each has its own zone, so sessions stay with the verifier of the router that they came to. Windows of three kinds
alternate:

- *alone*: one of the two has its load, the other has none;
- *apart*: both have their load, and no server of one knows those of the other: two clusters;
- *together*: the same load in one cluster, so that registry, drafters and what is learned about them are shared.

Between alone and apart the two compete for the machine; between apart and together they can disturb each other's
control, and nothing else changes. The last line has the medians of the rounds' ratios.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.options import padded_model
from bench.rows.cluster import running
from outrider.cli.command import parse_count, reported
from outrider.cli.performance.load import Load, Speculation, apply_load, read_prompts
from outrider.client import AsyncClient
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.rpc.lifecycle import run_until_signal

ANSWER = 64  # tokens
SALTS = 1000
SEED = 2024
SLOTS = 6  # for each caller: a router sends a session to another zone if a quarter of its own zone's slots are taken


class Speeds(NamedTuple):
    """Tokens per second of the two verifiers in one window."""

    busy: float
    idle: float

    def over(self, other: Speeds) -> Speeds:
        """Return both speeds as ratios of another window's."""
        return Speeds(self.busy / other.busy, self.idle / other.idle)


class Round(NamedTuple):
    """One window of each kind."""

    alone: Speeds
    apart: Speeds
    together: Speeds


@dataclass(frozen=True, slots=True)
class Pair:
    """Clients of the routers of both zones."""

    busy: AsyncClient
    idle: AsyncClient
    speculation: Speculation

    async def measure(self, busy: Load, idle: Load) -> Speeds:
        """Run both loads at the same time."""
        results = await asyncio.gather(self._apply(self.busy, busy), self._apply(self.idle, idle))
        return Speeds(*results)

    async def measure_alone(self, busy: Load, idle: Load) -> Speeds:
        """Run one load after the other."""
        return Speeds(await self._apply(self.busy, busy), await self._apply(self.idle, idle))

    async def _apply(self, client: AsyncClient, load: Load) -> float:
        return (await apply_load(client, load, speculation=self.speculation)).goodput


def main(
    parameters: Annotated[str, typer.Option(help="Size to pad the target to.")] = "150M",
    callers: Annotated[int, typer.Option(min=2, help="Callers of the busy verifier.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Windows of each kind, after one that is not counted.")] = 7,
    seconds: Annotated[float, typer.Option(min=1.0, help="Duration of a window.")] = 15.0,
    plain: Annotated[bool, typer.Option("--plain", help="Decode plainly: what the machine alone does.")] = False,
    models: Annotated[Path, typer.Option(help="Folder that holds target/ and drafter/.")] = Path("models"),
    texts: Annotated[Path, typer.Option(help="JSON lines with an id and a prompt.")] = Path("examples/held_out.jsonl"),
) -> None:
    """Measure what a busy verifier and an idle one of a cluster cost each other."""
    found: list[Round] = []
    speculation: Speculation = "off" if plain else None

    async def measure() -> None:
        async with padded_model(models / "target", parse_count(parameters)) as target:
            tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
            prompts = [tuple(tokenizer.encode(text).ids) for _, text in read_prompts(texts, "#short")]

            def load(callers: int, number: int) -> Load:
                return Load(prompts, callers, seconds, 0.0, ANSWER, seed=SEED + number, salts=SALTS)

            await measure_rounds(target, models / "drafter", callers, rounds, speculation, load, found)

    with reported():
        run_until_signal(measure())
    _print(found)
    print(last_line(found), flush=True)


async def measure_rounds(
    target: Path,
    drafter: Path,
    callers: int,
    rounds: int,
    speculation: Speculation,
    load: Callable[[int, int], Load],
    found: list[Round],
) -> None:
    progress = Console(stderr=True, highlight=False)
    zones = [_config(target, drafter, SLOTS * callers, zone) for zone in Speeds._fields]
    async with _pair(zones, speculation, shared=False) as apart, _pair(zones, speculation, shared=True) as together:
        for number in range(rounds + 1):
            progress.print(f"round {number} of {rounds}" + (", not counted" if not number else ""))
            loads = [(load(callers, 4 * number + kind), load(1, 4 * number + kind)) for kind in range(3)]
            alone = await apart.measure_alone(*loads[0])
            measured = Round(alone, await apart.measure(*loads[1]), await together.measure(*loads[2]))
            if number:
                found.append(measured)


def _config(target: Path, drafter: Path, slots: int, zone: str) -> ClusterConfig:
    return ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}, zone=zone),
        verifier=[VerifierConfig(model=target, name="target", threads=1, slots=slots, zone=zone)],
        drafter=[DrafterConfig(model=drafter, threads=1, slots=slots, zone=zone)],
    )


@asynccontextmanager
async def _pair(zones: Sequence[ClusterConfig], speculation: Speculation, *, shared: bool) -> AsyncIterator[Pair]:
    """Start the servers of both zones, in one cluster if it is `shared`, else in two."""
    async with AsyncExitStack() as stack:
        busy = await stack.enter_async_context(running(zones[0]))
        idle = await stack.enter_async_context(running(zones[1], redis=busy.redis if shared else None))
        yield Pair(busy.client, idle.client, speculation)


def ratios(found: Sequence[Round]) -> tuple[Speeds, Speeds]:
    """Return the medians of apart over alone, and of together over apart."""
    over_alone = [it.apart.over(it.alone) for it in found]
    over_apart = [it.together.over(it.apart) for it in found]
    return _medians(over_alone), _medians(over_apart)


def _medians(speeds: Sequence[Speeds]) -> Speeds:
    return Speeds(median(it.busy for it in speeds), median(it.idle for it in speeds))


def last_line(found: Sequence[Round]) -> str:
    """Return the line for scripts."""
    if not found:
        return "neighbours: -"
    apart, together = ratios(found)
    return (
        f"neighbours: together_over_apart: busy={together.busy:.2f} idle={together.idle:.2f} "
        f"apart_over_alone: busy={apart.busy:.2f} idle={apart.idle:.2f}"
    )


def _print(found: Sequence[Round]) -> None:
    table = Table(box=SIMPLE, show_edge=False)
    table.add_column("tokens/s: busy, idle")
    for kind in Round._fields:
        table.add_column(kind, justify="right", no_wrap=True)
    for number, it in enumerate(found, 1):
        table.add_row(f"round {number}", *(f"{speeds.busy:.0f}, {speeds.idle:.0f}" for speeds in it))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    typer.run(main)
