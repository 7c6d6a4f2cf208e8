"""`python -m bench.places`: where a drafter pays, and for how many callers: beside its verifier, near it, far away.

A verifier in four bits has a core of its own, as a machine that is bought for it would be. Its drafter is *beside* it,
on the same core, or *elsewhere*, on the other one, with a proxy as the link between them. In every place control first
learns with one caller; then all numbers of callers have the same requests, as has plain decoding, before the places and
behind them. What is asked for is everyday prompts in a chat template (`bench/prompts/real.jsonl`), at all temperatures.

Two questions are answered: how much faster a caller is served than by plain decoding, and how many callers a verifier
serves that each get a given speed: half of what plain decoding gives to one alone. arXiv 2606.25091 argues that over
wide networks a remote drafter brings the second and never the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.faults import FaultProxy
from bench.links import parse_link
from bench.options import SEED
from bench.real import DRAFTER_FILE, TEMPERATURES, read_real_prompts
from bench.rows.cluster import BenchCluster, running
from bench.rows.pinning import CoreSplit, pinned, split_cores
from outrider.cli.command import parse_count, reported
from outrider.cli.performance.load import Load, Prompt, apply_load
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.engine.checkpoints.gguf.recipes import pad_to_gguf
from outrider.example_files import SMOLLM2, real_file
from outrider.rpc.lifecycle import run_until_signal

CALLERS = (1, 2, 4, 8)
ROUND_TRIPS = ("0", "5", "20", "50", "200")  # ms, of a drafter elsewhere
ANSWER = 64  # tokens
PLAIN, BESIDE = "plain", "beside"


class Window(NamedTuple):
    """What a place made of a load."""

    place: str
    callers: int
    tokens_per_s: float  # of all callers together


class Places:
    """A cluster whose drafter is beside the verifier, and one whose drafter is behind a link that changes."""

    def __init__(self, beside: BenchCluster, elsewhere: BenchCluster, proxy: FaultProxy) -> None:
        self.beside = beside
        self.elsewhere = elsewhere
        self._proxy = proxy

    async def measure(self, place: str, load: Load) -> Window:
        """Apply a load. `place`: plain, beside, or the round trip in milliseconds of the link that was set."""
        cluster = self.beside if place in (PLAIN, BESIDE) else self.elsewhere
        result = await apply_load(cluster.client, load, speculation="off" if place == PLAIN else None)
        return Window(place, load.callers, result.goodput)

    def set_link(self, round_trip: str) -> None:
        """Move the drafter that is elsewhere."""
        parse_link(round_trip).apply(self._proxy)


@asynccontextmanager
async def placed(target: Path, drafter: Path, slots: int, split: CoreSplit) -> AsyncIterator[Places]:
    """Start both clusters."""

    def config(via: str | None) -> ClusterConfig:
        return ClusterConfig(
            router=RouterConfig(listen="127.0.0.1:0", models={"target": target}),
            verifier=[VerifierConfig(model=target, name="target", slots=slots, threads=1, lookup=None)],
            drafter=[DrafterConfig(model=drafter, slots=slots, threads=1, via=via)],
        )

    together = split._replace(drafters_beside=True)
    async with (
        FaultProxy("", seed=SEED) as proxy,
        running(config(None), together) as beside,
        running(config(proxy.address), split) as elsewhere,
    ):
        proxy.target = elsewhere.verifier_address  # set before the first connection
        with pinned(split.others):
            yield Places(beside, elsewhere, proxy)


async def measure(
    places: Places, prompts: Sequence[Prompt], callers: Sequence[int], seconds: float
) -> AsyncIterator[Window]:
    """Yield a window of every place and number of callers. Three windows precede each place, in which control learns;
    a quarter of one precedes each window.
    """
    base = Load(prompts, 1, seconds, seconds / 4, ANSWER, TEMPERATURES, think_s=0.01)
    for place in (PLAIN, BESIDE, *ROUND_TRIPS, PLAIN):
        if place in ROUND_TRIPS:
            places.set_link(place)
        if place != PLAIN:
            await places.measure(place, replace(base, seconds=3 * seconds, seed=SEED))
        for count in callers:
            yield await places.measure(place, replace(base, callers=count, seed=SEED + count))


def callers_at(speed: float, of_place: Mapping[int, float]) -> float:
    """Return how many callers get `speed` tokens a second each, at most as many as were measured.

    `of_place`: tokens a second of all callers together, by their number. Between two numbers the time of a caller's
    token is taken as a straight line.
    """
    callers, seconds = 0, 0.0  # of a token
    for more, of_all in sorted(of_place.items()):
        longer = more / of_all
        if longer > 1.0 / speed:
            return callers + (more - callers) * (1.0 / speed - seconds) / (longer - seconds)
        callers, seconds = more, longer
    return float(callers)


def by_place(windows: Sequence[Window]) -> dict[str, dict[int, float]]:
    """Return the tokens a second of all callers, by place and number of callers; of several windows their mean."""
    found: dict[str, dict[int, list[float]]] = {}
    for window in windows:
        found.setdefault(window.place, {}).setdefault(window.callers, []).append(window.tokens_per_s)
    return {place: {callers: fmean(them) for callers, them in of_it.items()} for place, of_it in found.items()}


def last_line(windows: Sequence[Window], size: str) -> str:
    """Return the line for scripts: one caller's speed over plain decoding, and callers at half of that, over plain."""
    found = by_place(windows)
    plain = found[PLAIN]
    fixed = plain[1] / 2
    figures = [f"places: target={size} plain={plain[1]:.1f}"]
    for place in (it for it in found if it != PLAIN):
        faster, more = found[place][1] / plain[1], callers_at(fixed, found[place]) / callers_at(fixed, plain)
        figures.append(f"{place}={faster:.2f},{more:.2f}")
    return " ".join(figures)


def main(
    size: Annotated[str, typer.Option(help="Parameters to pad the target to, in Q4_K_M.")] = "1B",
    drafter: Annotated[Path, typer.Option(help="Its checkpoint.")] = DRAFTER_FILE,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of a window.")] = 12.0,
) -> None:
    """Measure where a drafter pays."""
    windows: list[Window] = []

    async def run() -> None:
        file = real_file(SMOLLM2)
        prompts: list[Prompt] = [it.ids for it in read_real_prompts(file, 10)]
        with TemporaryDirectory(prefix="outrider-places-") as scratch:
            target = Path(scratch) / "target.gguf"
            print(f"padding the model to {size} and quantizing it to Q4_K_M", flush=True)
            await asyncio.to_thread(pad_to_gguf, file, target, "Q4_K_M", parse_count(size), 2)
            async with placed(target, drafter, 2 * max(CALLERS), split_cores()) as places:
                async for window in measure(places, prompts, CALLERS, seconds):
                    windows.append(window)
                    print(f"{window.place}, {window.callers} callers: {window.tokens_per_s:.1f} tokens/s", flush=True)

    with reported():
        run_until_signal(run())
    _print(windows)
    print(last_line(windows, size), flush=True)


def _print(windows: Sequence[Window]) -> None:
    found = by_place(windows)
    plain = found[PLAIN]
    table = Table(box=SIMPLE, show_edge=False)
    table.add_column("drafter; round trip, ms")
    for callers in plain:
        table.add_column(f"{callers} callers", justify="right", no_wrap=True)
    table.add_column(f"callers at {plain[1] / 2:.1f} tokens/s", justify="right")
    for place, speeds in found.items():
        cells = (f"{speed:.1f} ({speed / plain[callers]:.2f})" for callers, speed in speeds.items())
        table.add_row(place, *cells, f"{callers_at(plain[1] / 2, speeds):.1f}")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    typer.run(main)
