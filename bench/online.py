"""`python -m bench.online`: measures a drafter that learns while it serves, on traffic that changes.

The benchmark makes the drafter for the old traffic: it distils it from the target on the tables of arithmetic that
CPython tests `decimal` with. The new traffic is the Python source of a library, which neither model has seen; the
target predicts such text well. The same requests go to a cluster whose drafter learns and to one whose drafter does
not, one after the other, all on this machine. Both must generate the same texts, so numerics are invariant.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import rich
import typer
from rich.console import Console
from tokenizers import Tokenizer

from bench.rows.cluster import BenchCluster, running
from outrider.cli.command import parse_count, reported
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.errors import ConfigError
from outrider.rpc.lifecycle import run_until_signal

PROMPT = 128  # tokens of a prompt
ANSWER = 128
CALLERS = 2
TEMPERATURES = (0.0, 0.6, 1.0)  # of the requests, in turn
WINDOW = 24 * ANSWER  # tokens of a point
TABLES = Path(sysconfig.get_path("stdlib")) / "test" / "decimaltestdata"
SOURCE = Path(rich.__file__).parent
COMPILED = {".pyc", ".so"}  # suffixes of files that are not text
LAYERS = (0, 5)  # layers of the target that drafters start from, as the reference drafter does
LEARNED = 300_000  # tokens of the old traffic that the drafter is distilled on
TRAINER_S = 120.0  # timeout of the trainer's start


@dataclass(frozen=True, slots=True)
class OnlineAnswer:
    """One finished generation."""

    number: int  # of the request
    at: float  # seconds since the phase began
    temperature: float
    text: tuple[int, ...]
    steps: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return len(self.text)


Phase = list[OnlineAnswer]


def main(
    parameters: Annotated[str, typer.Option(help="Size to pad the target to.")] = "100M",
    tokens: Annotated[int, typer.Option(min=2 * WINDOW, help="Tokens of the new traffic.")] = 30_000,
    share: Annotated[float, typer.Option(help="Share of a processor that the trainer may use.")] = 0.4,
    models: Annotated[Path, typer.Option(help="Folder that holds target/.")] = Path("models"),
    old: Annotated[
        Path, typer.Option(help="Folder of texts: the old traffic, for which the drafter is made.", show_default=False)
    ] = TABLES,
    new: Annotated[Path, typer.Option(help="Folder of texts: the new traffic.", show_default=False)] = SOURCE,
    keep: Annotated[Path | None, typer.Option(help="Folder for the drafter; a later run uses it again.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG with the plot of acceptance lengths.")] = None,
) -> None:
    """Measure acceptance length and tokens a second while traffic changes, with learning and without."""
    with reported(), TemporaryDirectory() as scratch:
        from outrider.engine.checkpoints.padding import pad_checkpoint

        target, drafter = Path(scratch) / "target", (keep or Path(scratch)) / "drafter-of-old-traffic"
        tokenizer = Tokenizer.from_file(str(models / "target" / "tokenizer.json"))
        before, after = (pieces(tokenizer, read_pages(folder)) for folder in (old, new))
        make_drafter(drafter, models / "target", old)
        pad_checkpoint(models / "target", target, parameters=parse_count(parameters))
        rows: dict[str, tuple[Phase, Phase]] = {}
        run_until_signal(_measure(target, drafter, before, after, tokens, share, Path(scratch), rows))
    if len(rows) == 2:  # an interrupted run has fewer
        _report(rows, plot)


async def _measure(
    target: Path,
    drafter: Path,
    old: Sequence[tuple[int, ...]],
    new: Sequence[tuple[int, ...]],
    tokens: int,
    share: float,
    scratch: Path,
    rows: dict[str, tuple[Phase, Phase]],
) -> None:
    progress = Console(stderr=True, highlight=False)
    for learns in (False, True):
        name = "learning" if learns else "not learning"
        config = ClusterConfig(
            router=RouterConfig(
                listen="127.0.0.1:0",
                models={"target": target},
                policy="rounds",
                depth=4,
                teaches=("*",) if learns else (),
            ),
            verifier=[VerifierConfig(model=target, name="target", slots=CALLERS, threads=1, numerics="invariant")],
            drafter=[DrafterConfig(model=drafter, slots=CALLERS, threads=1, learns=learns)],
        )
        async with running(config) as cluster:
            training = _training(cluster, drafter, scratch / "learned", share) if learns else nullcontext()
            progress.print(f"{name}: old traffic")
            before = await _serve(cluster, old, 2 * WINDOW)
            async with training:
                progress.print(f"{name}: new traffic")
                rows[name] = before, await _serve(cluster, new, tokens)


@asynccontextmanager
async def _training(cluster: BenchCluster, drafter: Path, output: Path, share: float) -> AsyncIterator[None]:
    """Run the trainer as a user starts it; the block begins when it is ready."""
    command = ("-m", "outrider.cli", "train", "online", "--model", drafter, "--target", "target")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *map(str, (*command, "--output", output, "--share", share)),
        env={**os.environ, "REDIS_URL": cluster.redis.url},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(TRAINER_S):
            await process.stdout.readline()
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _serve(cluster: BenchCluster, prompts: Sequence[tuple[int, ...]], tokens: int) -> Phase:
    """Generate answers until they have `tokens` tokens, with the same requests in the same order each time."""
    began = time.monotonic()
    numbers = itertools.count()
    answers: Phase = []

    async def call() -> None:
        while (number := next(numbers)) * ANSWER < tokens:
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            answer = await cluster.client.generate(
                prompts[number % len(prompts)],
                seed=number,
                temperature=temperature,
                max_tokens=ANSWER,
                ignore_eos=True,
            )
            now = time.monotonic() - began
            answers.append(OnlineAnswer(number, now, temperature, tuple(answer.token_ids), answer.usage.steps))

    async with asyncio.TaskGroup() as callers:
        for _ in range(CALLERS):
            callers.create_task(call())
    return answers


def make_drafter(folder: Path, target: Path, text: Path) -> None:
    """Train a drafter as a user does; a finished one is kept. Exits with the command's status if it fails."""
    command = ("train", "drafter", "--target", target, "--text", text, "--output", folder)
    budget = ("--layers", ",".join(map(str, LAYERS)), "--tokens", LEARNED)
    ended = subprocess.run((sys.executable, "-m", "outrider.cli", *map(str, (*command, *budget))), stdout=sys.stderr)
    if ended.returncode:
        raise typer.Exit(ended.returncode)


def read_pages(folder: Path) -> list[str]:
    """Return the texts of a folder. Raises ConfigError if there are none."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in COMPILED]
    if not files:
        raise ConfigError(
            f"{folder}: holds no texts; this Python came without its tests, name others with --old FOLDER"
            if folder == TABLES
            else f"{folder}: holds no texts"
        )
    return [path.read_text(encoding="utf-8", errors="replace") for path in files]


def pieces(tokenizer: Tokenizer, pages: Sequence[str]) -> list[tuple[int, ...]]:
    """Return prompts from all parts of the pages, shuffled."""
    found = [
        tuple(tokens[at : at + PROMPT])
        for tokens in (tokenizer.encode(page).ids for page in pages)
        for at in range(0, len(tokens) - PROMPT, 2 * PROMPT)
    ]
    random.Random(0).shuffle(found)
    return found


def tokens_of(answers: Sequence[OnlineAnswer]) -> int:
    """Return the number of tokens of all answers."""
    return sum(answer.tokens for answer in answers)


def length(answers: Sequence[OnlineAnswer]) -> float:
    """Return the acceptance length: committed tokens per step."""
    return tokens_of(answers) / sum(answer.steps for answer in answers)


def speed(answers: Sequence[OnlineAnswer]) -> float:
    """Return the tokens per second."""
    return tokens_of(answers) / answers[-1].at


def windows(answers: Sequence[OnlineAnswer], first: int = 0) -> list[tuple[int, float]]:
    """Return the end and the acceptance length of each window of `WINDOW` tokens; the answers begin at `first`."""
    each = WINDOW // ANSWER
    return [
        (first + (start + each) * ANSWER, length(answers[start : start + each]))
        for start in range(0, len(answers) - each + 1, each)
    ]


def gain(without: Phase, learning: Phase) -> float:
    """Return the relative gain of acceptance length in the last third."""
    return length(learning[-(len(learning) // 3) :]) / length(without[-(len(without) // 3) :]) - 1.0


def last_line(without: Phase, learning: Phase) -> str:
    """Return the line for scripts: the gain of acceptance length in the last third, and the loss of overall speed."""
    return f"online_gain={gain(without, learning):.3f} online_cost={1.0 - speed(learning) / speed(without):.3f}"


def _report(rows: dict[str, tuple[Phase, Phase]], plot: Path | None) -> None:
    for name, (before, after) in rows.items():
        points = " ".join(f"{value:.2f}" for _, value in windows(after))
        print(
            f"{name}: old traffic {length(before):.2f} at {speed(before):.0f} tokens/s; new traffic "
            f"{length(after):.2f} at {speed(after):.0f} tokens/s, by {WINDOW} tokens: {points}"
        )
    if plot is not None:
        from bench.report import plots

        plots.online({name: windows(old, -tokens_of(old)) + windows(new) for name, (old, new) in rows.items()}, plot)
    (_, without), (_, learning) = rows.values()
    for temperature in TEMPERATURES:
        ahead = gain(
            *([answer for answer in phase if answer.temperature == temperature] for phase in (without, learning))
        )
        print(f"learning at T = {temperature:g}: ahead by {100 * ahead:+.1f} % in the last third")
    texts = [{answer.number: answer.text for answer in phase} for phase in (without, learning)]
    same = sum(text == texts[1].get(number) for number, text in texts[0].items())
    print(f"{same} of {len(texts[0])} texts are the same with learning and without")
    print(last_line(without, learning), flush=True)
    if same < len(texts[0]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
