"""`outrider bench`: measures the speed of a running cluster under load, without and with speculation."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.cli.command import INTERRUPTED, Address, Profile, reported
from outrider.errors import ConfigError
from outrider.rpc.lifecycle import run_until_signal

if TYPE_CHECKING:
    from outrider.cli.performance.load import Load, LoadResult

WIDTH = 120  # of a table in a file
LIST_MODELS_S = 10.0  # timeout of the call that lists a router's models


class LoadSuite(StrEnum):
    """Measurements that need no cluster."""

    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class _Point:
    """The figures of one load with or without speculation."""

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
    callers: Annotated[
        list[int] | None, typer.Option(min=1, help="Concurrent callers; may be repeated. [default: 1, 4]")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of counting, for each load and mode.")] = 10.0,
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions of each load.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens an answer.")] = 64,
    temperatures: Annotated[
        list[float] | None,
        typer.Option("--temperature", help="Requests draw one of these; may be repeated. [default: 0, 1]"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file, too.")
    ] = None,
    suite: Annotated[
        LoadSuite | None,
        typer.Option(help="Measure the engine on this machine's GPU instead; needs a checkout (`make bench-gpu`)."),
    ] = None,
) -> None:
    """Measure a running cluster, alternately without and with speculation. Answers continue after an end of text."""
    if suite is not None:
        raise SystemExit(_run_suite(suite))
    from outrider.cli.performance.load import Load, read_prompts

    with reported():
        if prompts is None:
            raise ConfigError("PROMPTS.jsonl: a file of prompts is needed, for example examples/held_out.jsonl")
        texts = [text for _, text in read_prompts(prompts)]
        _check_writable(output)
    drawn_from = tuple(temperatures or (0.0, 1.0))
    loads = [
        (repetition, Load(texts, count, seconds, min(2.0, seconds / 4), max_tokens, drawn_from, seed=repetition))
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

    from outrider.cli.performance.load import apply_load
    from outrider.client import AsyncClient
    from outrider.errors import Unavailable

    async with AsyncClient(address, profile=profile) as client:
        served = [entry for entry in await client.models(timeout=LIST_MODELS_S) if model in ("", entry.name)]
        if not any(entry.drafters for entry in served):
            raise Unavailable(f"no drafter can draft for {model or 'a model'} at {client.address}; start one")
        with Console(stderr=True).status("warming up ...") as status:
            for speculative in (False, True):
                await client.generate(
                    loads[0][1].prompts[0], model=model, max_tokens=16, speculation=_policy(speculative)
                )
            for number, (repetition, load) in enumerate(loads):
                for speculative in (False, True) if number % 2 else (True, False):
                    mode = "speculative" if speculative else "plain"
                    status.update(f"{load.callers} callers, repetition {repetition + 1}: {mode} ...")
                    result = await apply_load(client, load, speculation=_policy(speculative), model=model)
                    points.append(_point(load.callers, repetition, speculative, result))


def _point(callers: int, repetition: int, speculative: bool, result: LoadResult) -> _Point:
    from outrider.cli.performance.samples import acceptance_length, bytes_per_token, percentile

    samples = result.samples
    gaps = [gap for sample in samples for gap in sample.gaps]
    figures = (
        acceptance_length(samples),
        percentile((sample.first_token_s for sample in samples), 50),
        percentile(gaps, 50),
        percentile(gaps, 99),
        bytes_per_token(samples),
    )
    known = [None if figure != figure else figure for figure in figures]  # NaN where no answer ended in time
    return _Point(callers, repetition, speculative, result.goodput, len(samples), *known)


def _show(points: list[_Point]) -> None:
    from statistics import median

    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from outrider.cli.performance.samples import paired_ratio

    table = Table(box=SIMPLE, show_edge=False)
    columns = ("callers", "plain\ntok/s", "spec.\ntok/s", "\nspeedup", "accept.\nlength", "wire B\na token")
    for heading in (*columns, "first token, ms\nplain / spec.", "gap p50, ms\nplain / spec.", "p99, ms\nplain / spec."):
        table.add_column(heading, justify="right", no_wrap=True)

    def median_of(chosen: list[_Point], figure: str, scale: float, digits: int) -> str:
        values = [getattr(point, figure) for point in chosen if getattr(point, figure) is not None]
        return f"{median(values) * scale:.{digits}f}" if values else "-"

    for callers in dict.fromkeys(point.callers for point in points):
        here = [point for point in points if point.callers == callers]
        plain, spec = ([point for point in here if point.speculative is mode] for mode in (False, True))
        speeds = [{point.repetition: point.goodput for point in side} for side in (spec, plain)]
        ratio = paired_ratio(*speeds)
        table.add_row(
            str(callers),
            median_of(plain, "goodput", 1, 1),
            median_of(spec, "goodput", 1, 1),
            "-" if ratio is None else f"{ratio:.2f}",
            median_of(spec, "acceptance_length", 1, 2),
            median_of(spec, "wire_bytes_per_token", 1, 0),
            *(
                f"{median_of(plain, figure, 1e3, digits)} / {median_of(spec, figure, 1e3, digits)}"
                for figure, digits in (("first_token_p50_s", 0), ("gap_p50_s", 1), ("gap_p99_s", 1))
            ),
        )
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = WIDTH
    screen.print(table)
    screen.print(
        "tok/s: durable tokens a second over all callers, the median over repetitions; speedup: the median of their "
        "ratios. Each caller sends its next request after an answer. A gap is the time between two arrivals; tokens "
        "that arrive together are one arrival. First tokens may be quick because a prompt's KV is still cached.",
        markup=False,
    )


def _policy(speculative: bool) -> Literal["off"] | None:
    """Return the policy to request; None is the router's default."""
    return None if speculative else "off"


def _run_suite(suite: LoadSuite) -> int:
    """Run a suite of the checkout's `bench` as a separate process and return its exit status."""
    root = Path(__file__).parents[3]
    with reported():
        if not (root / "bench" / f"{suite}.py").is_file():
            raise ConfigError(f"--suite {suite}: is part of a checkout of Outrider, not of the package; run it in one")
    return subprocess.run([sys.executable, "-m", f"bench.{suite}"], cwd=root, check=False).returncode
