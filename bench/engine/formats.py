"""Quantized types: passes, prompts, whole texts and logits of our engine and of llama.cpp, over the same files.

The model is a GGUF file that other people made, as it is and padded to the sizes of real models.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from tempfile import TemporaryDirectory

from bench.engine.gaps import TEXTS, LogitGap, logits_file
from bench.engine.passes import LLAMA_CPP, OURS, ROUNDS, PassSource, PassTime, multiplied_weights, pass_limit_s
from bench.engine.roofline import measure
from bench.options import SEED, BenchOptions, parameters_of
from bench.peers.llama_cpp import llama_files, rows_of_worker
from bench.rows.cluster import BenchCluster, ClusterRow, running
from bench.rows.processes import output, resident_mb
from bench.rows.requests import BenchRequest
from bench.rows.row import BenchRow, Models, worker, worker_row
from outrider.engine.checkpoints.gguf.recipes import pad_to_gguf
from outrider.hub import Mixture

TYPES: tuple[Mixture, ...] = ("Q4_K_M", "Q4_0", "Q8_0")  # of padded models; of large ones the first alone
LARGE = 2_000_000_000  # parameters; larger models have no row of transformers, which needs 2 bytes for each
ROWS = (1, 4, 8, 16)
PROMPT = 1000  # tokens
TEXT = "Write a short story about a lighthouse keeper and his dog."
DISTRIBUTED, TRANSFORMERS = "distributed", "transformers"
MOST_TOKENS = 96  # of a text whose logits are compared
TEXTS_COMPARED = 64  # pages of Python's documentation; over eleven texts two engines that are alike differed by 16 %
WARM_UP_TOKENS, LEARNING_TOKENS = 16, 256  # the second where a cluster measures how its drafters work best

Progress = Callable[[str], None]  # receives the current activity


@dataclass(frozen=True, slots=True)
class FormatSpeed:
    """How fast a prompt, or a text at temperature 1, was computed in each round."""

    target: int  # parameters
    dtype: str
    row: str  # OURS and LLAMA_CPP: a prompt; names of rows: texts
    tokens_per_s: tuple[float, ...]

    def over(self, other: FormatSpeed) -> float:
        """Return the median of the ratios to another's of the same round."""
        return median(one / two for one, two in zip(self.tokens_per_s, other.tokens_per_s, strict=True))


@dataclass(frozen=True, slots=True)
class FormatStart:
    """The start of a verifier of a file that is in memory already."""

    seconds: float  # until it is ready
    above_file_mb: float  # its memory then, without as many bytes as the file has


@dataclass(frozen=True, slots=True)
class FormatResults:
    """What the suite measured."""

    passes: Sequence[PassTime]
    prompts: Sequence[FormatSpeed]
    texts: Sequence[FormatSpeed]
    start: FormatStart | None
    gaps: Sequence[LogitGap] = ()  # of the file as it is


async def measure_formats(options: BenchOptions, file: Path, target: int | None, report: Progress) -> FormatResults:
    """Measure a file as it is, or with `target` padded to that many parameters."""
    size = target or parameters_of(file)
    title = f"formats, {size / 1e6:.0f}M"
    passes: list[PassTime] = []
    prompts: list[FormatSpeed] = []
    texts: list[FormatSpeed] = []
    gaps: list[LogitGap] = []
    start = None
    async with files(options, file, target, lambda what: report(f"{title}: {what}")) as found:
        for dtype, path in found.items():
            async with sources(options, dtype, path) as both:
                passes += await _passes(options, size, path, both, lambda what: report(f"{title}, {what}"))
                report(f"{title}, {dtype}: prompts")
                prompts += await _prompts(options, size, both)
        if target is None:
            report(f"{title}: logits beside those of transformers")
            gaps = await _gaps(options, file)
        else:
            dtype, path = next(iter(found.items()))
            report(f"{title}, {dtype}: texts")
            found_texts, start = await _texts(options, size, dtype, path, file)
            texts += found_texts
    return FormatResults(passes, prompts, texts, start, gaps)


@asynccontextmanager
async def files(
    options: BenchOptions, file: Path, target: int | None, report: Progress
) -> AsyncIterator[dict[str, Path]]:
    """Yield the files by their types: the file itself, or its padded copies."""
    if target is None:
        yield {file.stem.rpartition(".")[2]: file}
        return
    with TemporaryDirectory(prefix="outrider-formats-") as scratch:
        found: dict[str, Path] = {}
        for kind in TYPES if target <= LARGE else TYPES[:1]:
            report(f"padding the model and quantizing it to {kind}")
            found[kind] = Path(scratch) / f"{kind}.gguf"
            await asyncio.to_thread(pad_to_gguf, file, found[kind], kind, target, options.threads)
        yield found


@asynccontextmanager
async def sources(options: BenchOptions, dtype: str, path: Path) -> AsyncIterator[list[PassSource]]:
    """Yield processes that have loaded a file: ours, and llama.cpp's."""
    async with AsyncExitStack() as stack:
        command = (sys.executable, "-m", "bench.engine.passes", str(options.threads), str(path), "auto")
        own = await stack.enter_async_context(worker(OURS, *command, environment=os.environ))
        read = int((await own.line()).decode().strip("{}\n").rpartition(":")[2])
        found = [PassSource(OURS, dtype, read, own, "auto")]
        if options.llama_cpp:
            peer = await stack.enter_async_context(llama_files({"--target": path}, options.threads))
            found.append(PassSource(LLAMA_CPP, dtype, read, peer))
        yield found


async def _passes(
    options: BenchOptions, size: int, path: Path, both: Sequence[PassSource], report: Progress
) -> list[PassTime]:
    from outrider.engine.checkpoints.checkpoint import read_config

    limit, multiplied = await measure(options.threads), multiplied_weights(read_config(path))
    found: dict[tuple[str, int], list[float]] = {}
    rates: list[float] = []
    order = list(both)
    command = (sys.executable, "-m", "bench.engine.roofline", str(options.threads), "again")
    async with worker("reading", *command, environment=os.environ) as reading:
        for number in range(max(ROUNDS, options.repetitions)):
            report(f"{both[0].dtype}: round {number + 1}")
            rates.append(float(await reading.request("")))
            for rows in ROWS:
                for source in order:
                    found.setdefault((source.engine, rows), []).append(await source.seconds(rows))
            order.reverse()
    return [
        PassTime(
            size,
            options.threads,
            source.engine,
            source.dtype,
            rows,
            tuple(found[source.engine, rows]),
            tuple(
                pass_limit_s(replace(limit, read_gb_s=rate), source.weight_bytes, multiplied, rows) for rate in rates
            ),
        )
        for source in both
        for rows in ROWS
    ]


async def _prompts(options: BenchOptions, size: int, both: Sequence[PassSource]) -> list[FormatSpeed]:
    found: dict[str, list[float]] = {source.engine: [] for source in both}
    for _ in range(options.repetitions):
        for source in both:
            found[source.engine].append(PROMPT / await source.prompt_seconds(PROMPT))
    return [FormatSpeed(size, both[0].dtype, engine, tuple(speeds)) for engine, speeds in found.items()]


async def _texts(
    options: BenchOptions, size: int, dtype: str, path: Path, drafter: Path
) -> tuple[list[FormatSpeed], FormatStart]:
    """Measure texts at temperature 1: a cluster whose drafter is the file itself, and llama.cpp's rows with it."""
    from outrider.engine.checkpoints.checkpoint import read_tokenizer

    prompt = tuple(read_tokenizer(path)[0].encode(TEXT).ids)
    found: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running(options.cluster(path, drafter=drafter)))
        start = await _started_again(cluster, path)
        rows: list[BenchRow] = [ClusterRow("plain", cluster, "off"), ClusterRow(DISTRIBUTED, cluster, None)]
        if options.llama_cpp:
            both = {"--target": path, "--draft": drafter}
            peer = await stack.enter_async_context(llama_files(both, options.threads))
            rows += rows_of_worker(peer)
        if size <= LARGE:
            models = Models(path, drafter, "bfloat16", options.threads)
            started = worker_row(TRANSFORMERS, models, options.cluster(path, drafter=drafter))
            rows.append(await stack.enter_async_context(started))
        for row in rows:
            warm_up = LEARNING_TOKENS if row.name == DISTRIBUTED else WARM_UP_TOKENS
            await row.generate(BenchRequest(prompt, 1.0, SEED, warm_up))
        for number in range(options.repetitions):
            for row in rows:
                sample = await row.generate(BenchRequest(prompt, 1.0, SEED + 1 + number, options.max_tokens))
                found.setdefault(row.name, []).append(sample.tokens_per_s)
            rows.reverse()
    return [FormatSpeed(size, dtype, row, tuple(speeds)) for row, speeds in found.items()], start


async def _gaps(options: BenchOptions, file: Path) -> list[LogitGap]:
    """Return how far our logits and llama.cpp's lie from those of the dequantized model."""
    from outrider.engine.checkpoints.checkpoint import read_tokenizer

    tokenizer, _ = read_tokenizer(file)
    texts = [tokenizer.encode(text).ids[:MOST_TOKENS] for _, text in sorted(topics.items())[:TEXTS_COMPARED]]
    with TemporaryDirectory(prefix="outrider-gaps-") as scratch:
        folder = Path(scratch)
        (folder / TEXTS).write_text(json.dumps(texts), encoding="utf-8")
        if options.llama_cpp:
            async with llama_files({"--target": file}, options.threads) as peer:
                for number, text in enumerate(texts):
                    place = str(logits_file(folder, LLAMA_CPP, number))
                    await peer.request(json.dumps({"logits": text, "file": place}))
        command = (sys.executable, "-m", "bench.engine.gaps", str(options.threads), str(file), scratch)
        printed = await output("the logits cannot be compared", *command)
    return [LogitGap(*json.loads(line)) for line in printed.splitlines()]


async def _started_again(cluster: BenchCluster, path: Path) -> FormatStart:
    """Start the verifier again, now that the file is in memory."""
    name = "verifier-0"
    seconds = await cluster.restart(name)
    return FormatStart(seconds, resident_mb(cluster.pids()[name]) - os.stat(path).st_size / 1e6)


def formats_line(results: Sequence[FormatResults]) -> str:
    """Return the line for scripts, of the last and largest model."""
    passes = {(it.engine, it.dtype, it.rows): it for it in results[-1].passes}
    kind = results[-1].passes[0].dtype
    own = [passes.get((engine, kind, rows)) for engine in (OURS, LLAMA_CPP) for rows in (1, 8)]
    texts = {it.row: it for it in results[-1].texts}
    best = [texts[DISTRIBUTED].over(it) for name, it in texts.items() if name.startswith(LLAMA_CPP)]
    figures = {
        "types": str(len({(it.target, it.dtype) for result in results for it in result.passes})),
        "read": f"{1 / own[0].over_limit:.2f}" if own[0] else "-",
        "over_llama_cpp_plain": f"{own[2].over(own[0]):.2f}" if own[0] and own[2] else "-",
        "over_llama_cpp_8_rows": f"{own[3].over(own[1]):.2f}" if own[1] and own[3] else "-",
        "distributed_over_llama_cpp": f"{min(best):.2f}" if best else "-",
    }
    return "formats: " + " ".join(f"{name}={value}" for name, value in figures.items())
