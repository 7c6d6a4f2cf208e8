"""`python -m bench`: compares Outrider's speed with that of alternatives, and with the machine's limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import typer
from rich.console import Console

from bench.distance import OVERLAPS
from bench.links import DEFAULT_LINKS, parse_link
from bench.options import BenchOptions, BenchSuite, Drafts, parameters_of
from bench.peers.checkouts import parse_peers
from bench.peers.llama_cpp import build
from bench.report.figures import BenchResults, last_line
from bench.report.results import save
from bench.report.tables import print_tables
from bench.rows.pinning import split_cores
from outrider.cli.command import INTERRUPTED, parse_count, reported
from outrider.cli.performance.load import read_prompts
from outrider.core.session.contract import LOSSY, RULES, SHARED_NOISE, RuleName
from outrider.errors import ConfigError
from outrider.rpc.lifecycle import run_until_signal


class _Preset(NamedTuple):
    """The default options of a full or a quick run."""

    suites: tuple[BenchSuite, ...]
    targets: tuple[int, ...]
    prompts: int
    repetitions: int
    max_tokens: int
    rules: tuple[RuleName, ...]
    drafts: tuple[Drafts, ...]
    learning_tokens: int


# Rules and drafters that can have rows of their own. Lossy rules cannot: they generate other texts than the target.
RULES_BESIDE = [rule for rule in RULES if rule not in (SHARED_NOISE, *LOSSY)]
DRAFTS_BESIDE = [drafts for drafts in get_args(Drafts) if drafts != "model"]
WIDTH = 132  # of tables that are printed to a file
MEASURES_LLAMA_CPP = {BenchSuite.ROWS, BenchSuite.PASSES, BenchSuite.FORMATS}
FORMAT_SIZES = (1_000_000_000,)  # parameters of the padded models of the suite formats
FULL = _Preset(
    tuple(BenchSuite),
    (150_000_000, 400_000_000),
    2,
    5,
    64,
    ("recursive-rejection", "block-verification"),
    ("prompt-lookup", "suffix"),
    512,
)
QUICK = _Preset((BenchSuite.ROWS,), (150_000_000,), 2, 2, 48, ("recursive-rejection",), ("suffix",), 128)


def main(
    suites: Annotated[list[BenchSuite] | None, typer.Option("--suite", help="[default: all; --quick: rows]")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a small version of the first suite: at most five minutes.")
    ] = False,
    targets: Annotated[
        list[int] | None,
        typer.Option(
            "--target", parser=parse_count, metavar="COUNT", help="Target sizes. [default: 150M, 400M; formats: 1B]"
        ),
    ] = None,
    unpadded: Annotated[
        bool, typer.Option("--unpadded", help="Measure --models as they are: checkpoints of your own, for example.")
    ] = False,
    temperatures: Annotated[list[float] | None, typer.Option("--temperature", help="[default: 0 and 1]")] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Held-out prompts; in rows: for each repetition. [default: 2]")
    ] = None,
    repetitions: Annotated[int | None, typer.Option(min=1, help="[default: 5]")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="New tokens of each text. [default: 64]")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of all weights.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="Threads of the rows of other engines.")] = 2,
    verifier_threads: Annotated[int, typer.Option(min=1)] = 2,
    drafter_threads: Annotated[int, typer.Option(min=1)] = 1,
    router: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="As in a cluster file.")] = None,
    verifier: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="As in a cluster file.")] = None,
    drafter: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="As in a cluster file.")] = None,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--rule", help="A row of this rule. [default: recursive-rejection, block-verification; --quick: the first]"
        ),
    ] = None,
    drafts: Annotated[
        list[str] | None,
        typer.Option(
            "--drafts", help="A row of a drafter without a model. [default: prompt-lookup, suffix; --quick: suffix]"
        ),
    ] = None,
    callers: Annotated[list[int] | None, typer.Option(min=1, help="Load suite. [default: 1, 2, 4, ... 32]")] = None,
    load_seconds: Annotated[float, typer.Option(min=1, help="Seconds of each measurement of the load suite.")] = 20.0,
    arms: Annotated[
        list[str] | None,
        typer.Option("--arm", help='Load suite: a row in which drafters always work so: turns, ahead or "turns 1/4".'),
    ] = None,
    links: Annotated[
        list[str] | None,
        typer.Option(
            "--link",
            help="Distance suite: a round trip in ms, jitter (0 to 30 ms), or narrow (1 Mbit/s). "
            "[default: 0, 5, 20, 50, 200, jitter, narrow]",
        ),
    ] = None,
    overlaps: Annotated[
        list[str] | None,
        typer.Option(
            "--overlap",
            help="Distance suite: a row in which drafters draft beside a pass always, never, or in rounds; measured "
            "leaves it to the verifier. With 'relayed' and 'relayed rounds' the drafter dials, and drafts through the "
            "router; with 'larger' it is a larger one, with 'both' that one and the usual one near. "
            "[default: measured]",
        ),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="NAME=PATH", help="Add a row of another engine, from its checkout."),
    ] = None,
    no_llama_cpp: Annotated[
        bool, typer.Option("--no-llama-cpp", help="Leave out llama.cpp. By default it is built once from source.")
    ] = False,
    gguf: Annotated[
        Path | None, typer.Option(help="Formats suite: the model. [default: SmolLM2 135M from the package index]")
    ] = None,
    models: Annotated[Path, typer.Option(help="Folder that holds target/ and drafter/.")] = Path("models"),
    texts: Annotated[Path, typer.Option(help="JSON lines with an id and a prompt.")] = Path("examples/held_out.jsonl"),
    name: Annotated[
        str | None, typer.Option("--save", metavar="NAME", help="Name of the results. [default: the time]")
    ] = None,
) -> None:
    """Run the benchmark. If it measured everything, the last line is the one for scripts."""
    preset = QUICK if quick else FULL
    with reported():
        for needed in (models / "target" / "config.json", models / "drafter" / "config.json"):
            if not needed.is_file():
                raise ConfigError(f"--models: {needed} does not exist; run in a checkout of Outrider")
        if unpadded and targets:
            raise ConfigError("--unpadded: the target stays as it is; give no --target")
        sizes = [parameters_of(models / "target")] if unpadded else targets
        short, long = read_prompts(texts, "#short"), read_prompts(texts, "#long")
        count = prompts or preset.prompts
        if count > len(short):
            raise ConfigError(f"--prompts: is {count}, {texts} has {len(short)} short ones")
        repeated = repetitions or preset.repetitions
        options = BenchOptions(
            suites=tuple(suites or preset.suites),
            targets=tuple(sizes or preset.targets),
            temperatures=tuple(temperatures or (0.0, 1.0)),
            short=tuple(short[:count]),
            fresh=tuple(islice(cycle(short), count * repeated + 1)),
            long=tuple(long[: -(-count // 4)]),  # one in five
            repetitions=repeated,
            max_tokens=max_tokens or preset.max_tokens,
            dtype=dtype,
            threads=threads,
            router=_section(router, "--router"),
            verifier={"threads": verifier_threads, **_section(verifier, "--verifier")},
            drafter={"threads": drafter_threads, **_section(drafter, "--drafter")},
            rules=_chosen(rules or preset.rules, RULES_BESIDE, "--rule"),
            drafts=_chosen(drafts or preset.drafts, DRAFTS_BESIDE, "--drafts"),
            learning_tokens=preset.learning_tokens,
            models=models,
            peers=parse_peers(peers or ()),
            llama_cpp=not no_llama_cpp,
            profiled_steps=256,
            callers=tuple(callers or (1, 2, 4, 8, 16, 32)),
            arms=tuple(dict.fromkeys(arms or ())),
            load_s=load_seconds,
            ramp_s=load_seconds / 2,
            links=tuple(dict.fromkeys(map(parse_link, links or DEFAULT_LINKS))),
            overlaps=_chosen(overlaps or ("measured",), [*OVERLAPS], "--overlap"),
            gguf=gguf,
            formats=tuple(targets or FORMAT_SIZES),
        )
        if BenchSuite.DISTANCE in options.suites:
            split_cores()  # refuses a machine that cannot pin
        for arm in ("measured", *options.arms):
            options.cluster(models / "target", arm=arm)  # checks all keys now, not after minutes
    results = BenchResults()
    done = False

    began = time.monotonic()

    async def run() -> None:
        nonlocal began, done
        if options.llama_cpp and not MEASURES_LLAMA_CPP.isdisjoint(options.suites):
            await build(lambda what: Console(stderr=True, highlight=False).print(what, markup=False, soft_wrap=True))
        began = time.monotonic()  # the build does not count as run time
        await _run(options, results)
        done = True

    run_until_signal(run())
    if not done:
        raise SystemExit(INTERRUPTED)
    _show(options, results, name, time.monotonic() - began)


async def _run(options: BenchOptions, results: BenchResults) -> None:
    from bench.running import run_distance, run_formats, run_gpu, run_load, run_passes, run_rows, run_tiers

    suites = {
        BenchSuite.ROWS: run_rows,
        BenchSuite.LOAD: run_load,
        BenchSuite.DISTANCE: run_distance,
        BenchSuite.PASSES: run_passes,
        BenchSuite.TIERS: run_tiers,
        BenchSuite.GPU: run_gpu,
        BenchSuite.FORMATS: run_formats,
    }
    progress = Console(stderr=True, highlight=False)
    with progress.status("starting ...") as status:

        def report(what: str) -> None:
            status.update(what)
            if not progress.is_terminal:
                progress.print(what, markup=False, soft_wrap=True)

        for suite in options.suites:
            await suites[suite](options, results, report)


def _show(options: BenchOptions, results: BenchResults, name: str | None, seconds: float) -> None:
    from bench.report.plots import draw

    line = last_line(results)
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = WIDTH
    print_tables(screen, results)
    path = save(options, results, name, seconds, line)
    shown = ", ".join(plot.name for plot in draw(results, path))
    screen.print(f"{seconds:.0f} s. {path}{shown and '; ' + shown}", markup=False, soft_wrap=True)
    print(line, flush=True)


def _chosen(names: Sequence[str], allowed: Sequence[Any], flag: str) -> tuple[Any, ...]:
    """Return the names without duplicates. Raises ConfigError for a name without a row."""
    for name in names:
        if name not in allowed:
            raise ConfigError(f"{flag}: '{name}' must be one of {', '.join(allowed)}")
    return tuple(dict.fromkeys(names))


def _section(entries: list[str] | None, flag: str) -> dict[str, str]:
    """Return the keys and values of a section; pydantic parses the values. Raises ConfigError."""
    values = dict(entry.partition("=")[::2] for entry in entries or ())
    if not all(key and value for key, value in values.items()):
        raise ConfigError(f"{flag}: must be KEY=VALUE")
    return values


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
