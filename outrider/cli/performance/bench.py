"""`outrider bench`: measures the speed of a running cluster under load, without and with speculation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from outrider.cli.command import INTERRUPTED, Address, Profile, figures_table, reported
from outrider.errors import ConfigError
from outrider.rpc.lifecycle import run_until_signal

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.cli.performance.load import Load
    from outrider.cli.performance.points import LoadPoint
    from outrider.cli.performance.questions import Question
    from outrider.cli.performance.spec_bench import AnswerOptions
    from outrider.client import AsyncClient

WIDTH = 120  # of a table in a file
LIST_MODELS_S = 10.0  # timeout of the call that lists a router's models


class LoadSuite(StrEnum):
    """Measurements that need no cluster."""

    GPU = "gpu"


def bench(
    prompts: Annotated[
        Path | None,
        typer.Argument(
            metavar="PROMPTS.jsonl",
            help='JSON lines {"prompt": "..."}, or the form of Spec-Bench, SPEED-Bench, ShareGPT or OpenAI\'s batches.',
        ),
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
    raw: Annotated[
        bool, typer.Option("--raw", help="Send turns as plain text, to a model without a chat template.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file, too.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with the figures that an earlier run wrote by --json.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plot tokens a second over callers, and acceptance by depth (.png, .svg)."),
    ] = None,
    aiperf: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write each load's figures in AIPerf's form, each in a folder of its own."),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Instead of loads: answer each question both ways, and write Spec-Bench's files."
        ),
    ] = None,
    suite: Annotated[
        LoadSuite | None,
        typer.Option(help="Measure the engine on this machine's GPU instead; needs a checkout (`make bench-gpu`)."),
    ] = None,
) -> None:
    """Measure a running cluster, alternately without and with speculation. Answers to loads continue after an end of
    text; those of --answers do not."""
    if suite is not None:
        raise SystemExit(_run_suite(suite))
    from outrider.cli.performance.load import Load
    from outrider.cli.performance.plots import check_plot, draw
    from outrider.cli.performance.points import read_points, write_points
    from outrider.cli.performance.questions import read_questions
    from outrider.cli.performance.spec_bench import AnswerOptions

    with reported():
        if prompts is None:
            raise ConfigError("PROMPTS.jsonl: a file of prompts is needed, for example examples/held_out.jsonl")
        questions = read_questions(prompts)
        for flag, written in (("--json", output), ("--plot", plot), ("--aiperf", aiperf), ("--answers", answers)):
            _check_writable(flag, written)
        if plot is not None:
            check_plot(plot)
        earlier = None if against is None else read_points(against)
        drawn_from = tuple(temperatures or ((0.0, 1.0) if answers is None else (0.0,)))
        if answers is not None and len(drawn_from) > 1:
            raise ConfigError("--temperature: --answers takes one; give it once")
    if answers is not None:
        options = AnswerOptions(model, max_tokens, drawn_from[0], raw)
        _answer(address, profile, questions, options, answers)
        return
    texts = [question.prompt(raw=raw) for question in questions]
    loads = [
        (repetition, Load(texts, count, seconds, min(2.0, seconds / 4), max_tokens, drawn_from, seed=repetition))
        for count in callers or (1, 4)
        for repetition in range(repetitions)
    ]
    points: list[LoadPoint] = []
    run_until_signal(_run(address, profile, model, loads, points, aiperf))
    if len(points) < 2 * len(loads):
        raise SystemExit(INTERRUPTED)
    _show(points, earlier)
    with reported(), _writing():
        if output is not None:
            write_points(output, points)
        if plot is not None:
            draw(plot, points)


def _check_writable(flag: str, output: Path | None) -> None:
    if output is not None and not output.resolve().parent.is_dir():
        raise ConfigError(f"{flag}: {output.parent} is not a folder")


@contextmanager
def _writing() -> Iterator[None]:
    """Raise ConfigError for a file that cannot be written, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename or 'a file'}: cannot be written ({error.strerror or error})") from None


def _answer(
    address: str | None, profile: str | None, questions: list[Question], options: AnswerOptions, folder: Path
) -> None:
    """Answer all questions both ways, write the files, and show the table."""
    from outrider.cli.performance.spec_bench import AnsweredQuestion, answer_questions, answers_table, write_answers

    answered: list[AnsweredQuestion] = []

    async def run() -> None:
        from rich.console import Console

        async with _served(address, profile, options.model) as client:
            with Console(stderr=True).status("answering ...") as status:

                def done(one: AnsweredQuestion) -> None:
                    answered.append(one)
                    status.update(f"{len(answered)} of {2 * len(questions)} answers ...")

                await answer_questions(client, questions, options, done)

    try:
        run_until_signal(run())
    finally:  # hours may be in them
        with reported(), _writing():
            write_answers(folder, answered)
    _screen().print(answers_table(answered))
    if len(answered) < 2 * len(questions):
        raise SystemExit(INTERRUPTED)


@asynccontextmanager
async def _served(address: str | None, profile: str | None, model: str) -> AsyncIterator[AsyncClient]:
    """A client of a router that serves the model with drafters. Raises Unavailable."""
    from outrider.client import AsyncClient
    from outrider.errors import Unavailable

    async with AsyncClient(address, profile=profile) as client:
        served = [entry for entry in await client.models(timeout=LIST_MODELS_S) if model in ("", entry.name)]
        if not any(entry.drafters for entry in served):
            raise Unavailable(f"no drafter can draft for {model or 'a model'} at {client.address}; start one")
        yield client


async def _run(
    address: str | None,
    profile: str | None,
    model: str,
    loads: list[tuple[int, Load]],
    points: list[LoadPoint],
    aiperf: Path | None,
) -> None:
    from rich.console import Console

    from outrider.cli.performance.aiperf import write_export
    from outrider.cli.performance.load import apply_load, request_of
    from outrider.cli.performance.points import LoadPoint

    async with _served(address, profile, model) as client:
        with Console(stderr=True).status("warming up ...") as status:
            for speculative in (False, True):
                prompt, keywords = request_of(loads[0][1].prompts[0])
                await client.generate(prompt, **keywords, model=model, max_tokens=16, speculation=_policy(speculative))
            for number, (repetition, load) in enumerate(loads):
                for speculative in (False, True) if number % 2 else (True, False):
                    mode = "speculative" if speculative else "plain"
                    status.update(f"{load.callers} callers, repetition {repetition + 1}: {mode} ...")
                    result = await apply_load(client, load, speculation=_policy(speculative), model=model)
                    points.append(LoadPoint.of(load.callers, repetition, speculative, result))
                    if aiperf is not None:
                        config = {"concurrency": load.callers, "speculation": mode, "max_tokens": load.max_tokens}
                        with _writing():
                            write_export(aiperf / f"{load.callers}-callers-{mode}-{repetition + 1}", result, config)


def _screen() -> Console:
    from rich.console import Console

    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = WIDTH
    return screen


def _show(points: list[LoadPoint], earlier: list[LoadPoint] | None) -> None:
    from statistics import median

    from outrider.cli.performance.samples import paired_ratio

    columns = ("callers", "plain\ntok/s", "spec.\ntok/s", "\nspeedup", "accept.\nlength", "wire B\na token")
    times = ("first token, ms\nplain / spec.", "gap p50, ms\nplain / spec.", "p99, ms\nplain / spec.")
    table = figures_table(*columns, *times)

    def median_of(chosen: list[LoadPoint], figure: str, scale: float, digits: int) -> str:
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
    screen = _screen()
    screen.print(table)
    if earlier is not None:
        from outrider.cli.performance.against import comparison_table

        screen.print(comparison_table(points, earlier))
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
