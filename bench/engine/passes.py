"""The cost of a pass by its number of rows: our engine and llama.cpp, in turn.

`python -m bench.engine.passes THREADS CHECKPOINT [DTYPE ...]` loads our engine once for each dtype, writes the bytes of
weights that a pass of each reads, and then answers each line, `{"dtype": ..., "rows": N}`, with the seconds of a pass
over N tokens after PASS_CONTEXT others. One untimed pass precedes it. `{"dtype": ..., "prompt_rows": N}`: of a prompt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, cast

from bench.engine.roofline import Limit, measure
from bench.options import BenchOptions, padded
from bench.peers.llama_cpp import llama_worker
from bench.peers.llama_worker import PASS_CONTEXT
from bench.rows.row import Models, WorkerRow, worker
from outrider.cli.command import reported
from outrider.fleet import process_env

if TYPE_CHECKING:
    from outrider.engine.checkpoints.checkpoint import ModelConfig
    from outrider.engine.interface.engine import Dtype, Engine

DTYPES: Sequence[Dtype] = ("bfloat16", "int8", "int4")
ROWS = (1, 2, 4, 8, 12, 16, 32)
ROUNDS = 7  # minimum
PREFILL_CHUNK = 128  # tokens of a prompt that a verifier reads at once
OURS, LLAMA_CPP = "outrider", "llama.cpp"


@dataclass(frozen=True, slots=True)
class PassTime:
    """The times of an engine's passes with one number of rows."""

    target: int  # parameters
    threads: int
    engine: str  # OURS or LLAMA_CPP
    dtype: str  # of the weights
    rows: int
    seconds: tuple[float, ...]  # of one pass in each round
    limits: tuple[float, ...]  # lower bound of each, in seconds, at the reading rate measured in the same round

    @property
    def ms(self) -> float:
        """The median time."""
        return median(self.seconds) * 1e3

    @property
    def over_limit(self) -> float:
        """The median of the ratios to the lower bound of the same round."""
        return median(one / least for one, least in zip(self.seconds, self.limits, strict=True))

    def over(self, other: PassTime) -> float:
        """Return the median of the ratios to another engine's passes in the same round."""
        return median(one / two for one, two in zip(self.seconds, other.seconds, strict=True))


@dataclass(frozen=True, slots=True)
class PassSource:
    """A process that times passes of one engine with one dtype."""

    engine: str
    dtype: str
    weight_bytes: int
    process: WorkerRow
    loaded_as: str = ""  # its dtype as the process knows it, where that is another

    async def seconds(self, rows: int) -> float:
        """Time one pass."""
        return await self._answer(rows=rows)

    async def prompt_seconds(self, rows: int) -> float:
        """Time a prompt."""
        return await self._answer(prompt_rows=rows)

    async def _answer(self, **request: int) -> float:
        line = json.dumps(request | {"dtype": self.loaded_as or self.dtype})
        return float(json.loads(await self.process.request(line)))


Progress = Callable[[str], None]  # receives the current activity


async def measure_passes(options: BenchOptions, target: int, progress: Progress) -> list[PassTime]:
    """Time each number of rows once in each round, with all engines in an order that rotates."""
    from outrider.engine.checkpoints.checkpoint import read_config

    title = f"passes, {target / 1e6:.0f}M"
    progress(f"{title}: padding the target")
    async with padded(options, target) as folder, AsyncExitStack() as stack:
        progress(f"{title}: measuring the machine's limit")
        limit = await measure(options.threads)
        multiplied = multiplied_weights(read_config(folder))
        progress(f"{title}: loading the engines")
        command = (sys.executable, "-m", "bench.engine.passes", str(options.threads), str(folder))
        process = await stack.enter_async_context(worker(OURS, *command, environment=os.environ))
        sizes: dict[str, int] = json.loads(await process.line())
        sources = [PassSource(OURS, dtype, size, process) for dtype, size in sizes.items()]
        if options.llama_cpp:
            models = Models(folder, options.models / "drafter", "bfloat16", options.threads)
            peer = await stack.enter_async_context(llama_worker(models))
            sources.append(PassSource(LLAMA_CPP, "bfloat16", 2 * multiplied, peer))
        reading = await stack.enter_async_context(
            worker(
                "reading",
                sys.executable,
                "-m",
                "bench.engine.roofline",
                str(options.threads),
                "again",
                environment=os.environ,
            )
        )
        rates: dict[int, list[float]] = {}  # 10^9 bytes per second, by rows, in each round
        found: dict[tuple[str, str, int], list[float]] = {}
        order, rounds = list(sources), max(ROUNDS, options.repetitions)
        for number in range(rounds):
            progress(f"{title}: round {number + 1} of {rounds}")
            for rows in ROWS:
                rates.setdefault(rows, []).append(float(json.loads(await reading.request(""))))
                for source in order:
                    found.setdefault((source.engine, source.dtype, rows), []).append(await source.seconds(rows))
            order = order[1:] + order[:1]
        progress(f"{title}: measuring the machine's limit again")
        limit = limit.better(await measure(options.threads))
    return [
        PassTime(
            target,
            options.threads,
            source.engine,
            source.dtype,
            rows,
            tuple(found[source.engine, source.dtype, rows]),
            tuple(
                pass_limit_s(replace(limit, read_gb_s=rate), source.weight_bytes, multiplied, rows)
                for rate in rates[rows]
            ),
        )
        for source in sources
        for rows in ROWS
    ]


def multiplied_weights(config: ModelConfig) -> int:
    """Return the number of weights that each row of a pass is multiplied with: the layers' matrices and the head."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = config.width * (2 * queries + 2 * keys + 3 * config.ffn)
    return config.layers * layer + config.vocabulary * config.width


def pass_limit_s(limit: Limit, weight_bytes: int, multiplied: int, rows: int) -> float:
    """Return the lower bound of a pass: reading its weights, or its multiplications in bfloat16."""
    return max(limit.read_s(weight_bytes), limit.multiply_s(multiplied, rows, "bfloat16"))


def engines(folder: Path, threads: int, dtypes: Sequence[str]) -> Iterator[tuple[str, Engine]]:
    """Yield our engine, loaded with each dtype: timed passes are in slot 0, prompts in slot 1."""
    from outrider.engine.loading import load_engine

    for dtype in dtypes:
        engine = load_engine(folder, dtype=cast("Dtype", dtype), slots=2, threads=threads)
        fill_context(engine)
        yield dtype, engine


def fill_context(engine: Engine) -> None:
    """Run the PASS_CONTEXT tokens that are before timed passes."""
    import numpy as np

    from outrider.engine.interface.batch import Segment

    engine.forward([Segment(0, 0, np.zeros(PASS_CONTEXT, np.int64), np.arange(PASS_CONTEXT), wanted=0)])


def pass_seconds(engine: Engine, rows: int) -> float:
    """Time a pass over `rows` tokens after the context. One pass before it does not count."""
    import numpy as np

    from outrider.engine.interface.batch import Segment

    segment = Segment(0, PASS_CONTEXT, np.zeros(rows, np.int64), np.arange(PASS_CONTEXT, PASS_CONTEXT + rows))
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        engine.forward([segment])
        seconds = time.perf_counter() - began
    return seconds


def prompt_seconds(engine: Engine, rows: int) -> float:
    """Time a prompt of `rows` tokens, in pieces as a verifier reads it, to the logits behind it."""
    import numpy as np

    from outrider.engine.interface.batch import Segment

    began = time.perf_counter()
    for first in range(0, rows, PREFILL_CHUNK):
        positions = np.arange(first, min(rows, first + PREFILL_CHUNK))
        last = positions[-1] == rows - 1
        engine.forward([Segment(1, first, np.zeros_like(positions), positions, wanted=int(last))])
    return time.perf_counter() - began


def main(threads: int, folder: Path, dtypes: Sequence[str]) -> None:
    """Answer requests for passes of our engine."""
    process_env.set_variables(threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries must not mix with the answers
    with reported(), closing(answers):
        loaded = dict(engines(folder, threads, dtypes))
        sizes = {dtype: engine.weight_bytes for dtype, engine in loaded.items()}
        print(json.dumps(sizes), file=answers, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            engine = loaded[request["dtype"]]
            timed = prompt_seconds if "prompt_rows" in request else pass_seconds
            seconds = timed(engine, request.get("rows") or request["prompt_rows"])
            print(json.dumps(seconds), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or DTYPES)
