"""`outrider bench`: how fast a running cluster is, without and with speculation, under a load."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.cli.connecting import Address, Profile
from outrider.cli.reporting import INTERRUPTED, reported
from outrider.errors import ConfigError
from outrider.rpc.lifecycle import run_until_signal

if TYPE_CHECKING:
    from outrider.cli.load import Carried, Load

WIDTH = 120  # of a table in a file
ANSWER_S = 10.0  # for a router to say what it serves


class Suite(StrEnum):
    """What is measured without a cluster."""

    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class _Point:
    """One way under one load."""

    callers: int
    repetition: int
    speculative: bool
    goodput: float  # tokens per second over all callers
    answers: int
    acceptance_length: float | None
    first_token_p50_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None
    wire_bytes_per_token: float | None


def bench(
    prompts: Annotated[
        Path | None, typer.Argument(metavar="PROMPTS.jsonl", help='JSON lines: {"prompt": "..."}.')
    ] = None,
    address: Address = None,
    profile: Profile = None,
    model: Annotated[str, typer.Option(help="May be left out where one model is served.")] = "",
    callers: Annotated[list[int] | None, typer.Option(min=1, help="At once; may be repeated. [default: 1, 4]")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="That tokens are counted, for each way and load.")] = 10.0,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each load.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens an answer.")] = 64,
    temperatures: Annotated[
        list[float] | None, typer.Option("--temperature", help="Drawn from these; may be repeated. [default: 0, 1]")
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there too.")] = None,
    suite: Annotated[
        Suite | None,
        typer.Option(help="Not a cluster, but the engine on this machine's GPU; needs a checkout (`make bench-gpu`)."),
    ] = None,
) -> None:
    """Measure a running cluster, plain and speculative in turn. Answers go on after an end of text."""
    if suite is not None:
        raise SystemExit(_run_suite(suite))
    from outrider.cli.load import Load, read_prompts

    with reported():
        if prompts is None:
            raise ConfigError("PROMPTS.jsonl: a file of prompts is needed, for example examples/held_out.jsonl")
        texts = [text for _, text in read_prompts(prompts)]
        _check_writable(output)
    heats = tuple(temperatures or (0.0, 1.0))
    loads = [
        (repetition, Load(texts, count, seconds, min(2.0, seconds / 4), max_tokens, heats, seed=repetition))
        for count in callers or (1, 4)
        for repetition in range(repetitions)
    ]
    points: list[_Point] = []
    run_until_signal(_run(address, profile, model, loads, points))
    if len(points) < 2 * len(loads):
        raise SystemExit(INTERRUPTED)
    _show(points)
    if output is not None:
        output.write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n", encoding="utf-8")


def _check_writable(output: Path | None) -> None:
    if output is not None and not output.resolve().parent.is_dir():
        raise ConfigError(f"--json: {output.parent} is not a folder")


async def _run(
    address: str | None, profile: str | None, model: str, loads: list[tuple[int, Load]], points: list[_Point]
) -> None:
    from rich.console import Console

    from outrider.cli.load import carry
    from outrider.client import AsyncClient
    from outrider.errors import Unavailable

    async with AsyncClient(address, profile=profile) as client:
        served = [entry for entry in await client.models(timeout=ANSWER_S) if model in ("", entry.name)]
        if not any(entry.drafters for entry in served):
            raise Unavailable(f"no drafter can draft for {model or 'a model'} at {client.address}; start one")
        with Console(stderr=True).status("warming up ...") as status:
            for speculative in (False, True):
                await client.generate(loads[0][1].prompts[0], model=model, max_tokens=16, speculation=_way(speculative))
            for number, (repetition, load) in enumerate(loads):
                for speculative in (False, True) if number % 2 else (True, False):
                    way = "speculative" if speculative else "plain"
                    status.update(f"{load.callers} callers, repetition {repetition + 1}: {way} ...")
                    carried = await carry(client, load, speculation=_way(speculative), model=model)
                    points.append(_point(load.callers, repetition, speculative, carried))


def _point(callers: int, repetition: int, speculative: bool, carried: Carried) -> _Point:
    from outrider.cli.samples import acceptance_length, bytes_per_token, percentile

    samples = carried.samples
    gaps = [gap for sample in samples for gap in sample.gaps]
    figures = (
        acceptance_length(samples),
        percentile((sample.first_token_s for sample in samples), 50),
        percentile(gaps, 50),
        percentile(gaps, 99),
        bytes_per_token(samples),
    )
    known = [None if figure != figure else figure for figure in figures]  # NaN where no answer ended in time
    return _Point(callers, repetition, speculative, carried.goodput, len(samples), *known)


def _show(points: list[_Point]) -> None:
    from statistics import median

    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from outrider.cli.samples import paired_ratio

    table = Table(box=SIMPLE, show_edge=False)
    columns = ("callers", "plain\ntok/s", "spec.\ntok/s", "\nspeedup", "accept.\nlength", "wire B\na token")
    for heading in (*columns, "first token, ms\nplain / spec.", "gap p50, ms\nplain / spec.", "p99, ms\nplain / spec."):
        table.add_column(heading, justify="right", no_wrap=True)

    def middle(chosen: list[_Point], figure: str, scale: float, digits: int) -> str:
        values = [getattr(point, figure) for point in chosen if getattr(point, figure) is not None]
        return f"{median(values) * scale:.{digits}f}" if values else "-"

    for callers in dict.fromkeys(point.callers for point in points):
        here = [point for point in points if point.callers == callers]
        plain, spec = ([point for point in here if point.speculative is way] for way in (False, True))
        speeds = [{point.repetition: point.goodput for point in side} for side in (spec, plain)]
        ratio = paired_ratio(*speeds)
        table.add_row(
            str(callers),
            middle(plain, "goodput", 1, 1),
            middle(spec, "goodput", 1, 1),
            "-" if ratio is None else f"{ratio:.2f}",
            middle(spec, "acceptance_length", 1, 2),
            middle(spec, "wire_bytes_per_token", 1, 0),
            *(
                f"{middle(plain, figure, 1e3, digits)} / {middle(spec, figure, 1e3, digits)}"
                for figure, digits in (("first_token_p50_s", 0), ("gap_p50_s", 1), ("gap_p99_s", 1))
            ),
        )
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = WIDTH
    screen.print(table)
    screen.print(
        "tok/s: durable tokens a second over all callers, the median over repetitions; speedup: the median of their "
        "ratios. Callers ask again when they have an answer. A gap is the time between two arrivals; tokens that "
        "arrive together are one arrival. First tokens may find the KV of a prompt that was asked before.",
        markup=False,
    )


def _way(speculative: bool) -> Literal["off"] | None:
    return None if speculative else "off"


def _run_suite(suite: Suite) -> int:
    """A suite of a checkout's bench, as a process of its own; its exit status."""
    root = Path(__file__).parents[2]
    with reported():
        if not (root / "bench" / f"{suite}.py").is_file():
            raise ConfigError(f"--suite {suite}: is part of a checkout of Outrider, not of the package; run it in one")
    return subprocess.run([sys.executable, "-m", f"bench.{suite}"], cwd=root, check=False).returncode
