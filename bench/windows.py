"""`python -m bench.windows`: every ten seconds of a shifting load, beside ten seconds of the same load decoded plainly.

The load changes at random, by a seed: callers, kind of text, temperature, the drafters' distance, and how many drafters
there are; they are killed and started anew. Before and after each window the same cluster has the same requests for ten
seconds with speculation off, so that what the machine does by itself is seen as well: the ratio of the two plain
windows. Two clusters side by side would not do: of two without drafters one was five percent slower all the time.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.faults import FaultProxy
from bench.rows.cluster import BenchCluster, running
from outrider.cli.command import parse_count, reported
from outrider.cli.performance.load import Load, apply_load, read_prompts
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.rpc.lifecycle import run_until_signal

WINDOW_S = 10.0
STRETCH = 2  # windows between two changes of the load
CALLERS = (1, 2, 4, 8, 16, 32)
TEMPERATURES = ((0.0,), (1.0,), (0.0, 1.0))
ROUND_TRIPS_MS = (0.0, 5.0, 20.0, 50.0)
DRAFTERS = 2
ANSWER = 64  # tokens
SLOTS = 36
SALTS = 1000
SEED = 2024
PROSE = Path("README.md")
LOOK_S = 0.5  # between two looks at the governor
LEAST_PROSE = 200  # characters of a paragraph that is a prompt


@dataclass(frozen=True, slots=True)
class ShiftingLoad:
    """What stays the same for some windows."""

    callers: int
    text: str  # "code" or "prose"
    temperatures: tuple[float, ...]
    round_trip_ms: float
    drafters: int

    def __str__(self) -> str:
        drawn = " and ".join(f"{temperature:g}" for temperature in self.temperatures)
        return f"{self.callers} callers, {self.text}, T = {drawn}, {self.round_trip_ms:g} ms, {self.drafters} drafters"


@dataclass(slots=True)
class ControlLog:
    """What the verifier's governor did in a window, looked at twice a second: what a window has lost is speculation's
    doing only as far as it drafted, and the governor has noticed it only as far as the delay budget was spent."""

    arms: Counter[str] = field(default_factory=Counter)  # in force, at how many looks
    least_budget_s: float = math.inf  # of delay

    @asynccontextmanager
    async def watching(self, cluster: BenchCluster) -> AsyncIterator[None]:
        """Look while the body runs."""

        async def look() -> None:
            while True:
                steering = (await cluster.control("verifier-0"))["steering"]
                self.arms[steering["arm"]] += 1
                self.least_budget_s = min(self.least_budget_s, steering["delay_budget_s"])
                await asyncio.sleep(LOOK_S)

        looking = asyncio.create_task(look())
        try:
            yield
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking

    def __str__(self) -> str:
        looks = max(1, self.arms.total())
        arms = ", ".join(f"{arm} {count / looks:.0%}" for arm, count in self.arms.most_common())
        return f"{arms or '-'}; {1e3 * self.least_budget_s:.0f} ms"


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """Tokens per second in one window: as it is, and with speculation off before and after it."""

    load: ShiftingLoad
    ours: float
    before: float
    after: float
    control: ControlLog

    @property
    def over_plain(self) -> float:
        """The speed over the mean of plain decoding's."""
        return 2.0 * self.ours / (self.before + self.after)

    @property
    def by_itself(self) -> float:
        """The speed of the slower plain window over the mean of both: what a window may lose by the machine alone."""
        return 2.0 * min(self.before, self.after) / (self.before + self.after)


class ShiftingCluster:
    """A cluster with drafters, whose distance and number can be set."""

    def __init__(self, cluster: BenchCluster, proxy: FaultProxy) -> None:
        self._cluster = cluster
        self._proxy = proxy
        self._alive = DRAFTERS

    async def set_load(self, load: ShiftingLoad) -> None:
        """Move the drafters, and kill or start some."""
        self._proxy.delay_s = load.round_trip_ms / 2000
        while self._alive > load.drafters:
            self._alive -= 1
            os.kill(self._cluster.pids()[f"drafter-{self._alive}"], signal.SIGKILL)
        while self._alive < load.drafters:
            await self._cluster.start(f"drafter-{self._alive}")
            self._alive += 1

    async def measure(self, load: ShiftingLoad, prompts: Sequence[tuple[int, ...]], seed: int) -> WindowFigures:
        """Run the load for three windows."""
        window = Load(prompts, load.callers, WINDOW_S, 0.0, ANSWER, load.temperatures, seed=seed, salts=SALTS)
        before = await apply_load(self._cluster.client, replace(window, repetition=1), speculation="off")
        control = ControlLog()
        async with control.watching(self._cluster):
            ours = await apply_load(self._cluster.client, window)
        after = await apply_load(self._cluster.client, replace(window, repetition=2), speculation="off")
        return WindowFigures(load, ours.goodput, before.goodput, after.goodput, control)


def main(
    parameters: Annotated[str, typer.Option(help="Size to pad the target to.")] = "150M",
    minutes: Annotated[float, typer.Option(min=0.3, help="Minutes of the load; it takes three times as long.")] = 10.0,
    models: Annotated[Path, typer.Option(help="Folder that holds target/ and drafter/.")] = Path("models"),
    texts: Annotated[Path, typer.Option(help="JSON lines with an id and a prompt.")] = Path("examples/held_out.jsonl"),
    seed: Annotated[int, typer.Option(help="Of the load.")] = SEED,
) -> None:
    """Measure every window of a shifting load."""
    figures: list[WindowFigures] = []
    with reported(), TemporaryDirectory() as scratch:
        from tokenizers import Tokenizer

        from outrider.engine.checkpoints.padding import pad_checkpoint

        target = Path(scratch) / "target"
        pad_checkpoint(models / "target", target, parameters=parse_count(parameters))
        tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        prompts = {
            "code": [tuple(tokenizer.encode(text).ids) for _, text in read_prompts(texts, "#short")],
            "prose": [tuple(tokenizer.encode(text).ids) for text in _paragraphs(PROSE)],
        }
        windows = round(minutes * 60 / WINDOW_S)
        run_until_signal(measure_windows(target, models / "drafter", prompts, windows, seed, figures))
    _print(figures)
    print(last_line(figures), flush=True)


def shifting_loads(seed: int) -> Iterator[ShiftingLoad]:
    """Yield a load for each stretch."""
    dice = random.Random(seed)
    while True:
        yield ShiftingLoad(
            dice.choice(CALLERS),
            dice.choice(("code", "prose")),
            dice.choice(TEMPERATURES),
            dice.choice(ROUND_TRIPS_MS),
            dice.randint(0, DRAFTERS),
        )


async def measure_windows(
    target: Path,
    drafter: Path,
    prompts: dict[str, list[tuple[int, ...]]],
    windows: int,
    seed: int,
    figures: list[WindowFigures],
) -> None:
    progress = Console(stderr=True, highlight=False)
    loads = shifting_loads(seed)
    async with _shifting_cluster(target, drafter) as cluster:
        for window in range(windows):
            if window % STRETCH == 0:
                load = next(loads)
                await cluster.set_load(load)
            progress.print(f"window {window + 1} of {windows}: {load}")
            figures.append(await cluster.measure(load, prompts[load.text], seed + window))


@asynccontextmanager
async def _shifting_cluster(target: Path, drafter: Path) -> AsyncIterator[ShiftingCluster]:
    async with FaultProxy("") as proxy:
        router = RouterConfig(listen="127.0.0.1:0", models={"target": target})
        verifier = VerifierConfig(model=target, name="target", threads=2, slots=SLOTS, metrics="127.0.0.1:0")
        drafters = [DrafterConfig(model=drafter, slots=SLOTS, via=proxy.address) for _ in range(DRAFTERS)]
        async with running(ClusterConfig(router=router, verifier=[verifier], drafter=drafters)) as cluster:
            proxy.target = cluster.verifier_address  # set before the first connection
            yield ShiftingCluster(cluster, proxy)


def _paragraphs(file: Path) -> list[str]:
    paragraphs = file.read_text(encoding="utf-8").split("\n\n")
    return [text for text in paragraphs if len(text) >= LEAST_PROSE and text[0].isalpha()]


def last_line(figures: Sequence[WindowFigures]) -> str:
    """Return the line for scripts: the worst window and the median over plain decoding, all tokens over plain
    decoding's, and the worst window and the tenth percentile of plain decoding beside itself."""
    if not figures:
        return "windows: -"
    ours, itself = (sorted(getattr(it, name) for it in figures) for name in ("over_plain", "by_itself"))
    total = 2.0 * sum(it.ours for it in figures) / sum(it.before + it.after for it in figures)
    return (
        f"windows: worst={ours[0]:.2f} tenth={ours[len(ours) // 10]:.2f} median={median(ours):.2f} all={total:.2f} "
        f"plain_worst={itself[0]:.2f} plain_tenth={itself[len(itself) // 10]:.2f}"
    )


def _print(figures: Sequence[WindowFigures]) -> None:
    table = Table(box=SIMPLE, show_edge=False)
    table.add_column("load")
    for name in ("tokens/s", "plain before", "plain after", "over plain", "plain alone", "arms; least budget"):
        table.add_column(name, justify="right", no_wrap=True)
    for it in figures:
        speeds = (f"{speed:.0f}" for speed in (it.ours, it.before, it.after))
        table.add_row(str(it.load), *speeds, f"{it.over_plain:.2f}", f"{it.by_itself:.2f}", str(it.control))
    console = Console(highlight=False)
    console.width = max(160, console.width)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
