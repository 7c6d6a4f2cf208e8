"""What keys and values in int8 take, cost and change: `python -m bench.engine.kv_types CHECKPOINT`.

It prints the bytes of a token's KV, and the times of passes behind long contexts: engines with either type of KV take
turns, and figures are medians over rounds. Then it prints how far the logits of a text lie from those of KV in the
usual type: the mean and the widest gap of one logit.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Annotated, get_args

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from outrider.config import KvType, WeightType
from outrider.engine.checkpoints.checkpoint import read_tokenizer
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import PAGE, Engine
from outrider.engine.loading import load_engine

TYPES: tuple[KvType, ...] = get_args(KvType)
ROWS = (1, 8, 16)
READ = 1_000  # tokens that are read; the rest of a context are copies of their KV
CHUNK = 128  # rows of a pass that reads


def fill(engine: Engine, context: int) -> None:
    """Give the slot 0 of an engine KV for `context` rows."""
    tokens = np.random.default_rng(1).integers(0, engine.vocabulary, min(READ, context))
    for first in range(0, len(tokens), CHUNK):
        chunk = tokens[first : first + CHUNK]
        engine.forward([Segment(0, first, chunk, np.arange(first, first + len(chunk)), wanted=0)])
    rows = np.arange(len(tokens), context)
    engine.move(0, rows % len(tokens), rows)


def pass_seconds(engine: Engine, context: int, rows: int) -> float:
    """Time a pass over `rows` tokens behind `context` others."""
    segment = Segment(0, context, np.zeros(rows, np.int64), np.arange(context, context + rows))
    began = time.perf_counter()
    engine.forward([segment])
    return time.perf_counter() - began


def times(
    checkpoint: Path, dtype: WeightType, contexts: list[int], threads: int, rounds: int
) -> dict[tuple[int, int], dict[KvType, list[float]]]:
    """Return the seconds of passes, by context, rows and type of KV."""
    found: dict[tuple[int, int], dict[KvType, list[float]]] = {}
    for context in contexts:
        engines = {
            kind: load_engine(
                checkpoint, dtype=dtype, kv_dtype=kind, slots=1, rows=context + max(ROWS), threads=threads
            )
            for kind in TYPES
        }
        for engine in engines.values():
            fill(engine, context)
        for number in range(rounds + 1):  # the first one does not count
            for rows in ROWS:
                for kind, engine in engines.items():
                    seconds = pass_seconds(engine, context, rows)
                    if number:
                        found.setdefault((context, rows), {}).setdefault(kind, []).append(seconds)
    return found


def text_logits(
    checkpoint: Path, dtype: WeightType, kind: KvType, ids: NDArray[np.int64], threads: int
) -> NDArray[np.float32]:
    """Return the logits of a text: [tokens, vocabulary]."""
    engine = load_engine(checkpoint, dtype=dtype, kv_dtype=kind, slots=1, rows=len(ids), threads=threads)
    return np.concatenate(
        [
            engine.forward(
                [Segment(0, first, ids[first : first + CHUNK], np.arange(first, min(first + CHUNK, len(ids))))]
            )
            for first in range(0, len(ids), CHUNK)
        ]
    )


def token_bytes(checkpoint: Path, dtype: WeightType, kind: KvType) -> int:
    """Return the bytes of a token's KV."""
    engine = load_engine(checkpoint, dtype=dtype, kv_dtype=kind, slots=1, rows=PAGE)
    return engine.kv_bytes // PAGE


def main(
    checkpoint: Path,
    dtype: Annotated[WeightType, typer.Option(help="Type of the weights.")] = "auto",
    context: Annotated[list[int] | None, typer.Option(help="Tokens before a pass; may be repeated.")] = None,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text whose logits are compared.")] = 1_000,
    texts: Annotated[Path, typer.Option(help="JSON lines with an id and a prompt.")] = Path("examples/held_out.jsonl"),
) -> None:
    """Compare KV in int8 with KV in the usual type."""
    console = Console(highlight=False)
    table = Table(title=f"A pass, {threads} thread{'s' if threads > 1 else ''}, ms")
    for column in ("context", "rows", *TYPES, "ratio"):
        table.add_column(column, justify="right")
    for (length, rows), seconds in times(checkpoint, dtype, context or [1_000, 8_000, 32_000], threads, rounds).items():
        usual, coded = (seconds[kind] for kind in TYPES)
        ratio = median(one / two for one, two in zip(coded, usual, strict=True))
        cells = (f"{median(it) * 1e3:.2f}" for it in (usual, coded))
        table.add_row(f"{length:,}", str(rows), *cells, f"{ratio:.2f}")
    console.print(table)
    console.print("bytes of a token:", *(f"{kind} {token_bytes(checkpoint, dtype, kind):,}" for kind in TYPES))
    prompts = "".join(json.loads(line)["prompt"] for line in texts.read_text().splitlines())
    ids = np.array(read_tokenizer(checkpoint)[0].encode(prompts).ids[:tokens], np.int64)
    before, after = (text_logits(checkpoint, dtype, kind, ids, threads) for kind in TYPES)
    gaps = np.abs(after - before)
    same = (after.argmax(1) == before.argmax(1)).mean()
    console.print(f"kv_types: gap_mean={gaps.mean():.3f} gap_widest={gaps.max():.2f} same_best={same:.3f}")


if __name__ == "__main__":
    typer.run(main)
