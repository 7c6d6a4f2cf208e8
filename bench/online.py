"""`python -m bench.online`: a drafter that learns while it serves, on traffic that changes.

The prompts are Python source first, which the drafter was trained for, and then the tables of arithmetic that CPython
tests `decimal` with, which neither it nor the target has seen. The same requests are made of
a cluster whose drafter learns and of one whose drafter does not, one after the other and all of it on this machine.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import sysconfig
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from bench.cluster import Cluster, running
from outrider.cli.load import read_prompts
from outrider.cli.pad import parse_count
from outrider.cli.reporting import reported
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.errors import ConfigError
from outrider.rpc.lifecycle import run_until_signal

PROMPT = 128  # tokens of a prompt
ANSWER = 128
CALLERS = 2
HEATS = (0.0, 1.0)  # in turns
WINDOW = 2_500  # tokens of a point
TABLES = Path(sysconfig.get_path("stdlib")) / "test" / "decimaltestdata"
TRAINER_S = 120.0  # that the trainer gets to start


@dataclass(frozen=True, slots=True)
class Answer:
    """One generation, when it had ended."""

    at: float  # seconds since the phase began
    heat: float
    tokens: int
    steps: int


Phase = list[Answer]


def main(
    parameters: Annotated[str, typer.Option(help="The target is padded to that many.")] = "100M",
    tokens: Annotated[int, typer.Option(min=2 * WINDOW, help="Of the new traffic.")] = 30_000,
    share: Annotated[float, typer.Option(help="Of a processor that the trainer may take.")] = 0.2,
    models: Annotated[Path, typer.Option(help="Folder that holds target/ and drafter/.")] = Path("models"),
    texts: Annotated[Path, typer.Option(help="JSON lines: the old traffic.")] = Path("examples/held_out.jsonl"),
    new: Annotated[
        Path | None, typer.Option(help="Folder of texts: the new traffic. [default: CPython's decimal tests]")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of acceptance lengths.")] = None,
) -> None:
    """Measure acceptance length and tokens a second while traffic changes, with learning and without."""
    with reported(), TemporaryDirectory() as scratch:
        from tokenizers import Tokenizer

        from outrider.engine.padding import pad_checkpoint

        target = Path(scratch) / "target"
        pad_checkpoint(models / "target", target, parameters=parse_count(parameters))
        tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        pages = read_pages(new or TABLES)
        old = [tuple(tokenizer.encode(text).ids[:PROMPT]) for _, text in read_prompts(texts, "#short")]
        fresh = [piece for page in pages for piece in _pieces(tokenizer.encode(page).ids)]
        random.Random(0).shuffle(fresh)
        rows: dict[str, tuple[Phase, Phase]] = {}
        run_until_signal(_measure(target, models / "drafter", old, fresh, tokens, share, Path(scratch), rows))
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
            verifier=[VerifierConfig(model=target, name="target", slots=CALLERS, threads=1)],
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
            answers.append(Answer(time.monotonic() - began, heat, len(answer.token_ids), answer.usage.steps))

    async with asyncio.TaskGroup() as callers:
        for _ in range(CALLERS):
            callers.create_task(call())
    return answers


def read_pages(folder: Path) -> list[str]:
    """The texts of a folder. Raises ConfigError where there are none."""
    pages = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.rglob("*")) if path.is_file()]
    if not pages:
        raise ConfigError(
            f"{folder}: holds no texts; this Python came without its tests, name others with --new FOLDER"
            if folder == TABLES
            else f"{folder}: holds no texts"
        )
    return pages


def _pieces(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[at : at + PROMPT]) for at in range(0, len(tokens) - PROMPT, 2 * PROMPT)]


def length(answers: Sequence[Answer]) -> float:
    """Committed tokens of each step."""
    return sum(answer.tokens for answer in answers) / sum(answer.steps for answer in answers)


def speed(answers: Sequence[Answer]) -> float:
    """Tokens a second."""
    return sum(answer.tokens for answer in answers) / answers[-1].at


def windows(answers: Sequence[Answer]) -> list[tuple[int, float]]:
    """Acceptance length over each `WINDOW` tokens, and where it ends."""
    each = WINDOW // ANSWER
    return [
        ((start + each) * ANSWER, length(answers[start : start + each]))
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

        plots.online({name: windows(after) for name, (_, after) in rows.items()}, plot)
    (_, without), (_, learning) = rows.values()
    for heat in HEATS:
        ahead = gain(*([answer for answer in phase if answer.heat == heat] for phase in (without, learning)))
        print(f"learning at T = {heat:g}: ahead by {100 * ahead:+.1f} % in the last third")
    print(last_line(without, learning), flush=True)


if __name__ == "__main__":
    typer.run(main)
