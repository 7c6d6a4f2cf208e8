"""Answers of a real model to everyday prompts: our ways to draft, plain decoding and llama.cpp, over the same file.

usage: python -m bench.real [--gguf FILE] [--drafter CHECKPOINT] [--size 1B] [--type Q8_0] [--prompts 6] [--tokens 96]

The prompts are those of `bench/prompts/real.jsonl`, in the model's chat template: chat, code, summaries with the text
in the prompt, translation and JSON. In a round every row is asked each of them once, at a temperature that differs from
prompt to prompt: in its own answer to the same prompt a lookup would find most of the next one. Rows take turns, and an
answer goes on behind its end, so that all have equally many tokens. The target is the file as it is, or padded to the
cost of a larger model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.options import SEED, parameters_of
from bench.peers import openvino
from bench.peers.llama_cpp import LOOKUP as LLAMA_LOOKUP
from bench.peers.llama_cpp import LlamaRow, build, llama_files
from bench.peers.vllm import vllm_rows
from bench.report.results import FOLDER, machine
from bench.rows.cluster import ClusterRow, running
from bench.rows.processes import ROOT
from bench.rows.requests import BenchRequest
from bench.rows.row import BenchRow, Models, worker_row
from outrider.cli.command import parse_count, reported
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.engine.checkpoints.checkpoint import read_tokenizer
from outrider.engine.checkpoints.gguf.recipes import pad_to_gguf
from outrider.errors import ConfigError, Unavailable
from outrider.example_files import SMOLLM2, real_file

PROMPTS = Path(__file__).parent / "prompts" / "real.jsonl"
DRAFTER_FILE = ROOT / "models" / "smollm2-drafter.gguf"
TEMPERATURES = (0.0, 0.7, 1.0)
LEARNING = 256  # tokens in which control learns, before anything is measured
PLAIN, LOOKUP, DRAFTER, BOTH = "plain", "lookup", "drafter", "drafter and lookup"
OURS = (PLAIN, LOOKUP, DRAFTER, BOTH)


@dataclass(frozen=True)
class RealPrompt:
    """A prompt of the file, as ids."""

    category: str
    number: int  # within its category
    ids: tuple[int, ...]


@dataclass(frozen=True)
class RealTake:
    """One answer of a row."""

    row: str
    category: str
    prompt: int
    temperature: float
    round: int
    tokens_per_s: float
    tokens_a_step: float

    @property
    def place(self) -> tuple[str, int, float, int]:
        """What every row was asked once."""
        return self.category, self.prompt, self.temperature, self.round


def read_real_prompts(target: Path, count: int) -> list[RealPrompt]:
    """Return `count` prompts of each category, in the target's chat template, or as they are where it has none."""
    from outrider.training.answers.dialogue import Dialogues, read_prompts

    try:
        dialogues = Dialogues(target)

        def ids_of(content: str) -> tuple[int, ...]:
            return dialogues.asked(content).before

    except ConfigError:
        tokenizer, _ = read_tokenizer(target)

        def ids_of(content: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(content).ids)

    found = dict[str, list[str]]()
    for prompt in read_prompts(PROMPTS, "prompts"):
        found.setdefault(prompt.category, []).append(prompt.content)
    return [
        RealPrompt(category, number, ids_of(content))
        for category, contents in found.items()
        for number, content in enumerate(contents[:count])
    ]


@asynccontextmanager
async def rows_of(target: Path, scratch: Path, options: argparse.Namespace) -> AsyncIterator[list[BenchRow]]:
    """Start our clusters, and the peers that can be installed here."""
    drafter, threads = options.drafter, options.threads
    async with AsyncExitStack() as stack:
        rows: list[BenchRow] = []
        ways = [it for it in (LOOKUP, DRAFTER, BOTH) if it not in options.without]
        for way in ways if DRAFTER in ways else [PLAIN, *ways]:
            config = ClusterConfig(
                router=RouterConfig(listen="127.0.0.1:0", models={"target": target}),
                verifier=[
                    VerifierConfig(
                        model=target, slots=2, threads=threads, lookup="suffix" if way in (LOOKUP, BOTH) else None
                    )
                ],
                drafter=[DrafterConfig(model=drafter, slots=2, threads=1)] if way in (DRAFTER, BOTH) else [],
            )
            cluster = await stack.enter_async_context(running(config))
            if way in (PLAIN, DRAFTER):  # the others would find plain answers in what they have seen
                rows.append(ClusterRow(PLAIN, cluster, "off"))
            if way != PLAIN:
                rows.append(ClusterRow(way, cluster, None))
        for name, peer in PEERS.items():
            if name in options.without:
                continue
            try:
                rows += await stack.enter_async_context(peer(target, scratch, threads))
            except (ConfigError, Unavailable) as error:
                print(f"without {name}: {error}", flush=True)
        yield rows


@asynccontextmanager
async def _llama_rows(target: Path, scratch: Path, threads: int) -> AsyncIterator[list[LlamaRow]]:
    await build(lambda what: print(what, flush=True))
    async with llama_files({"--target": target}, threads) as worker:
        yield [
            LlamaRow("llama.cpp", 0, worker),
            LlamaRow("llama.cpp, prompt lookup", LLAMA_LOOKUP, worker, lookup=True),
        ]


@asynccontextmanager
async def _openvino_rows(target: Path, scratch: Path, threads: int) -> AsyncIterator[Sequence[BenchRow]]:
    await openvino.install()
    async with openvino.openvino_rows(target, threads) as rows:
        yield rows


@asynccontextmanager
async def _vllm_rows(target: Path, scratch: Path, threads: int) -> AsyncIterator[Sequence[BenchRow]]:
    async with vllm_rows(target, scratch, threads) as rows:
        yield rows


@asynccontextmanager
async def _transformers_rows(target: Path, scratch: Path, threads: int) -> AsyncIterator[Sequence[BenchRow]]:
    unused = ClusterConfig(router=RouterConfig(models={"target": target}), verifier=[VerifierConfig(model=target)])
    async with worker_row("transformers", Models(target, target, "float32", threads), unused) as row:
        yield [row]


PEERS = {"llama.cpp": _llama_rows, "transformers": _transformers_rows, "OpenVINO": _openvino_rows, "vLLM": _vllm_rows}


async def measure(
    rows: Sequence[BenchRow], prompts: Sequence[RealPrompt], options: argparse.Namespace
) -> AsyncIterator[RealTake]:
    """Yield the takes of all rows, which take turns in an order that changes."""
    for row in rows:
        await row.generate(BenchRequest(prompts[0].ids, 1.0, SEED, LEARNING if row.name in OURS else options.tokens))
    order = list(rows)
    for number in range(options.rounds):
        for prompt in prompts:
            temperature = TEMPERATURES[(prompt.number + number) % len(TEMPERATURES)]
            request = BenchRequest(prompt.ids, temperature, SEED + number, options.tokens)
            for row in order:
                sample = await row.generate(request)
                yield RealTake(
                    row.name,
                    prompt.category,
                    prompt.number,
                    temperature,
                    number,
                    sample.tokens_per_s,
                    len(sample.tokens) / max(1, sample.steps),
                )
            order.reverse()


def ratio(takes: Iterable[RealTake], row: str, others: Sequence[str]) -> float:
    """Return how much faster a row is than the fastest of others: the median over all that they were asked."""
    speeds: dict[tuple[str, int, float, int], dict[str, float]] = {}
    for take in takes:
        speeds.setdefault(take.place, {})[take.row] = take.tokens_per_s
    return median(it[row] / max(it[other] for other in others) for it in speeds.values())


def steps(takes: Iterable[RealTake], row: str) -> float:
    """Return a row's tokens a step: the mean of its answers'."""
    found = [take.tokens_a_step for take in takes if take.row == row]
    return sum(found) / len(found)


Cells = list[list[str]]  # of a table, its heads first


def speed_cells(takes: Sequence[RealTake], rows: Iterable[str]) -> Cells:
    """Return the table of rows' speeds by temperature."""
    temperatures = sorted({take.temperature for take in takes})
    heads = ["tokens a second", *(f"T = {at:g}" for at in temperatures)]
    return [heads, *([row, *(f"{speed(takes, row, at):.0f}" for at in temperatures)] for row in rows)]


def compared_cells(takes: Sequence[RealTake], peers: Sequence[str]) -> Cells:
    """Return the table of our speeds over the fastest peer, and of tokens a step, by category and temperature.

    `peers`: the others' rows, or plain decoding alone.
    """
    ours = [row for row in OURS if any(take.row == row for take in takes)]
    parts = [(name, [it for it in takes if it.category == name]) for name in dict.fromkeys(t.category for t in takes)]
    parts += [
        (f"all, T = {at:g}", [it for it in takes if it.temperature == at])
        for at in sorted({it.temperature for it in takes})
    ]
    return [
        ["over plain; tokens a step" if peers == [PLAIN] else "over peers; tokens a step", *ours],
        *([name, *(f"{ratio(part, row, peers):.2f}; {steps(part, row):.2f}" for row in ours)] for name, part in parts),
    ]


def table(cells: Cells) -> Table:
    """Return a table for the terminal."""
    (first, *others), *rows = cells
    shown = Table(first)
    for head in others:
        shown.add_column(head, justify="right")
    for row in rows:
        shown.add_row(*row)
    return shown


def speed(takes: Iterable[RealTake], row: str, temperature: float) -> float:
    """Return a row's median tokens a second at a temperature."""
    return median(it.tokens_per_s for it in takes if (it.row, it.temperature) == (row, temperature))


def last_line(takes: Sequence[RealTake], peers: Sequence[str], target: str) -> str:
    """Return the line for scripts: the best of our ways to draft, at temperatures 0 and 1."""
    figures, ways = {"target": target}, {take.row for take in takes} & {LOOKUP, DRAFTER, BOTH}
    for at in (0.0, 1.0):
        if not (part := [take for take in takes if take.temperature == at]):
            continue
        best = max(ways, key=lambda row: ratio(part, row, (PLAIN,)))
        figures[f"over_peers_t{at:g}"] = f"{ratio(part, best, peers):.2f}"
        figures[f"over_plain_t{at:g}"] = f"{ratio(part, best, (PLAIN,)):.2f}"
        figures[f"tokens_a_step_t{at:g}"] = f"{max(steps(part, row) for row in ways):.2f}"
    return "real: " + " ".join(f"{name}={value}" for name, value in figures.items())


async def run(options: argparse.Namespace) -> None:
    """Measure, print the table, and keep the takes."""
    file = options.gguf or real_file(SMOLLM2)
    prompts = read_real_prompts(file, options.prompts)
    with TemporaryDirectory(prefix="outrider-real-") as scratch:
        target, type_ = file, options.type or ("Q4_K_M" if options.size else "")
        if type_:
            target = Path(scratch) / "target.gguf"
            print(f"writing the model in {type_}", flush=True)
            size = options.size or parameters_of(file)
            await asyncio.to_thread(pad_to_gguf, file, target, type_, size, options.threads)
        takes: list[RealTake] = []
        async with rows_of(target, Path(scratch), options) as rows:
            peers = [row.name for row in rows if row.name not in OURS] or [PLAIN]
            wanted = options.rounds * len(prompts) * len(rows)
            async for take in measure(rows, prompts, options):
                takes.append(take)
                if len(takes) % len(rows) == 0:
                    at = f"{take.category}, T = {take.temperature:g}"
                    print(f"{len(takes)} of {wanted}: {at}: {take.tokens_per_s:.0f} tokens/s {take.row}", flush=True)
    rows_shown = dict.fromkeys(take.row for take in takes)
    Console(width=120).print(table(speed_cells(takes, rows_shown)), table(compared_cells(takes, peers)))
    name = "as-is" if options.size is None else f"{options.size / 1e9:g}B"
    name += f"-{options.type}" if options.type else ""
    line = last_line(takes, peers, name)
    save(options, takes, line)
    print(line)


def save(options: argparse.Namespace, takes: Sequence[RealTake], line: str) -> None:
    """Keep the takes in bench/results."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{options.save or time.strftime('real-%Y%m%d-%H%M%S')}.json"
    settings: dict[str, Any] = {name: str(value) for name, value in vars(options).items()}
    kept = {"line": line, "machine": machine(), "options": settings, "takes": [asdict(take) for take in takes]}
    path.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    print(path)


def main() -> None:
    """Parse the flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--gguf", type=Path, help="the model; default: SmolLM2 135M from the package index")
    flags.add_argument("--drafter", type=Path, default=DRAFTER_FILE, help="a checkpoint")
    flags.add_argument("--size", type=parse_count, help="parameters to pad the target to; default: as it is")
    flags.add_argument("--type", help="of the target's weights; default: the file's, or Q4_K_M where it is padded")
    flags.add_argument("--prompts", type=int, default=6, help="of each category")
    flags.add_argument("--rounds", type=int, default=1)
    flags.add_argument("--tokens", type=int, default=96, help="of an answer")
    flags.add_argument("--threads", type=int, default=2, help="of targets; drafters have one")
    flags.add_argument("--without", action="append", default=[], help="a row of ours, or a peer; may be repeated")
    flags.add_argument("--save", help="name of the results")
    with reported():
        asyncio.run(run(flags.parse_args()))


if __name__ == "__main__":
    main()
