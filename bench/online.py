"""`python -m bench.online`: a drafter that learns while it serves, on traffic that changes.

The drafter is made here for its first traffic: distilled from the target on the tables of arithmetic that CPython tests
`decimal` with. Then prompts are Python source that neither model has seen, of a library; the target is at home there.
The same requests are made of a cluster whose drafter learns and of one whose drafter does not, one after the other and
all of it on this machine. Texts must be the same to the bit, so numerics are invariant.
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

from bench.cluster import Cluster, running
from outrider.cli.pad import parse_count
from outrider.cli.reporting import reported
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.errors import ConfigError
from outrider.rpc.lifecycle import run_until_signal

PROMPT = 128  # tokens of a prompt
ANSWER = 128
CALLERS = 2
HEATS = (0.0, 0.6, 1.0)  # temperatures, in turns
WINDOW = 24 * ANSWER  # tokens of a point
TABLES = Path(sysconfig.get_path("stdlib")) / "test" / "decimaltestdata"
SOURCE = Path(rich.__file__).parent
COMPILED = {".pyc", ".so"}  # what is no text beside it
LAYERS = (0, 5)  # of the target, that drafters begin with: the reference drafter's
LEARNED = 300_000  # tokens of the old traffic that it is distilled on
TRAINER_S = 120.0  # that the trainer gets to start


@dataclass(frozen=True, slots=True)
class Answer:
    """One generation, when it had ended."""

    number: int  # of the request
    at: float  # seconds since the phase began
    heat: float
    text: tuple[int, ...]
    steps: int

    @property
    def tokens(self) -> int:
        """How many it has."""
        return len(self.text)


Phase = list[Answer]


def main(
    parameters: Annotated[str, typer.Option(help="The target is padded to that many.")] = "100M",
    tokens: Annotated[int, typer.Option(min=2 * WINDOW, help="Of the new traffic.")] = 30_000,
    share: Annotated[float, typer.Option(help="Of a processor that the trainer may take.")] = 0.4,
    models: Annotated[Path, typer.Option(help="Folder that holds target/.")] = Path("models"),
    old: Annotated[
        Path, typer.Option(help="Folder of texts: the old traffic, which the drafter is made for.", show_default=False)
    ] = TABLES,
    new: Annotated[Path, typer.Option(help="Folder of texts: the new traffic.", show_default=False)] = SOURCE,
    keep: Annotated[Path | None, typer.Option(help="Folder that keeps the drafter; it is made once.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of acceptance lengths.")] = None,
) -> None:
    """Measure acceptance length and tokens a second while traffic changes, with learning and without."""
    with reported(), TemporaryDirectory() as scratch:
        from outrider.engine.padding import pad_checkpoint

        target, drafter = Path(scratch) / "target", (keep or Path(scratch)) / "drafter-of-old-traffic"
        tokenizer = Tokenizer.from_file(str(models / "target" / "tokenizer.json"))
        before, after = (pieces(tokenizer, read_pages(folder)) for folder in (old, new))
        make_drafter(drafter, models / "target", old)
        pad_checkpoint(models / "target", target, parameters=parse_count(parameters))
        rows: dict[str, tuple[Phase, Phase]] = {}
        run_until_signal(_measure(target, drafter, before, after, tokens, share, Path(scratch), rows))
    if len(rows) == 2:  # it may have been interrupted
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
async def _training(cluster: Cluster, drafter: Path, output: Path, share: float) -> AsyncIterator[None]:
    """The trainer as a user starts it, from when it is ready."""
    command = ("-m", "outrider.cli", "train", "online", "--model", drafter, "--target", "target")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *map(str, (*command, "--output", output, "--share", share)),
        env={**os.environ, "REDIS_URL": cluster.redis_url},
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


async def _serve(cluster: Cluster, prompts: Sequence[tuple[int, ...]], tokens: int) -> Phase:
    """Answers until there are so many tokens; the same requests in the same order each time."""
    began = time.monotonic()
    asked = itertools.count()
    answers: Phase = []

    async def call() -> None:
        while (number := next(asked)) * ANSWER < tokens:
            heat = HEATS[number % len(HEATS)]
            answer = await cluster.client.generate(
                prompts[number % len(prompts)],
                seed=number,
                temperature=heat,
                max_tokens=ANSWER,
                ignore_eos=True,
            )
            now = time.monotonic() - began
            answers.append(Answer(number, now, heat, tuple(answer.token_ids), answer.usage.steps))

    async with asyncio.TaskGroup() as callers:
        for _ in range(CALLERS):
            callers.create_task(call())
    return answers


def make_drafter(folder: Path, target: Path, text: Path) -> None:
    """As a user makes one; what was made before stays. Ends with what the command ends with."""
    command = ("train", "drafter", "--target", target, "--text", text, "--output", folder)
    budget = ("--layers", ",".join(map(str, LAYERS)), "--tokens", LEARNED)
    ended = subprocess.run((sys.executable, "-m", "outrider.cli", *map(str, (*command, *budget))), stdout=sys.stderr)
    if ended.returncode:
        raise typer.Exit(ended.returncode)


def read_pages(folder: Path) -> list[str]:
    """The texts of a folder. Raises ConfigError where there are none."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in COMPILED]
    if not files:
        raise ConfigError(
            f"{folder}: holds no texts; this Python came without its tests, name others with --old FOLDER"
            if folder == TABLES
            else f"{folder}: holds no texts"
        )
    return [path.read_text(encoding="utf-8", errors="replace") for path in files]


def pieces(tokenizer: Tokenizer, pages: Sequence[str]) -> list[tuple[int, ...]]:
    """Prompts from all over the pages, shuffled."""
    found = [
        tuple(tokens[at : at + PROMPT])
        for tokens in (tokenizer.encode(page).ids for page in pages)
        for at in range(0, len(tokens) - PROMPT, 2 * PROMPT)
    ]
    random.Random(0).shuffle(found)
    return found


def tokens_of(answers: Sequence[Answer]) -> int:
    """Of all answers."""
    return sum(answer.tokens for answer in answers)


def length(answers: Sequence[Answer]) -> float:
    """Committed tokens of each step."""
    return tokens_of(answers) / sum(answer.steps for answer in answers)


def speed(answers: Sequence[Answer]) -> float:
    """Tokens a second."""
    return tokens_of(answers) / answers[-1].at


def windows(answers: Sequence[Answer], first: int = 0) -> list[tuple[int, float]]:
    """Acceptance length over each `WINDOW` tokens, and where it ends, of answers that begin at `first`."""
    each = WINDOW // ANSWER
    return [
        (first + (start + each) * ANSWER, length(answers[start : start + each]))
        for start in range(0, len(answers) - each + 1, each)
    ]


def gain(without: Phase, learning: Phase) -> float:
    """By which share acceptance length is ahead in the last third."""
    return length(learning[-(len(learning) // 3) :]) / length(without[-(len(without) // 3) :]) - 1.0


def last_line(without: Phase, learning: Phase) -> str:
    """For scripts: by how much acceptance length is ahead in the last third, and tokens a second behind in all."""
    return f"online_gain={gain(without, learning):.3f} online_cost={1.0 - speed(learning) / speed(without):.3f}"


def _report(rows: dict[str, tuple[Phase, Phase]], plot: Path | None) -> None:
    for name, (before, after) in rows.items():
        points = " ".join(f"{value:.2f}" for _, value in windows(after))
        print(
            f"{name}: old traffic {length(before):.2f} at {speed(before):.0f} tokens/s; new traffic "
            f"{length(after):.2f} at {speed(after):.0f} tokens/s, by {WINDOW} tokens: {points}"
        )
    if plot is not None:
        from bench import plots

        plots.online({name: windows(old, -tokens_of(old)) + windows(new) for name, (old, new) in rows.items()}, plot)
    (_, without), (_, learning) = rows.values()
    for heat in HEATS:
        ahead = gain(*([answer for answer in phase if answer.heat == heat] for phase in (without, learning)))
        print(f"learning at T = {heat:g}: ahead by {100 * ahead:+.1f} % in the last third")
    texts = [{answer.number: answer.text for answer in phase} for phase in (without, learning)]
    same = sum(text == texts[1].get(number) for number, text in texts[0].items())
    print(f"{same} of {len(texts[0])} texts are the same with learning and without")
    print(last_line(without, learning), flush=True)
    if same < len(texts[0]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
