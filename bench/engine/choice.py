"""The cost of choosing a token from a row of logits: compiled code and numpy, in turn, on one thread.

`python -m bench.engine.choice [--vocabulary N]` prints a table. Rows resemble those of models: normal noise, and some
tokens with much larger logits; flat rows, without such tokens, are the worst case. numpy's noise is computed with each
choice; a verifier computes it while the pass runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract

VOCABULARY = 151_936  # of Qwen2.5 and Qwen3
TEXT = 1000  # tokens; half of them belong to the answer
ROUNDS = 15
SAMPLING_TERMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "repetition penalty 1.1": {"repetition_penalty": 1.1},
    "bias on 300 ids": {"logit_bias": dict.fromkeys(range(300), -1.0)},
    "5 log-probabilities": {"logprobs": 5},
}


def row(vocabulary: int, standing_out: int) -> NDArray[np.float32]:
    """Return a row of logits: [vocabulary]."""
    dice = np.random.default_rng(1)
    logits = dice.normal(0.0, 2.0, vocabulary)
    logits[dice.integers(0, vocabulary, standing_out)] += 9.0 + dice.exponential(2.0, standing_out)
    return logits.astype(np.float32)


def milliseconds(vocabulary: int, standing_out: int, terms: dict[str, Any]) -> tuple[float, float]:
    """Return the milliseconds of a choice in compiled code and in numpy: medians over rounds that time both."""
    logits, text = row(vocabulary, standing_out), [*range(1, TEXT + 1)]
    contract = Contract(seed=1, max_tokens=TEXT, **terms)
    fast, slow = (Sampler(contract, vocabulary, text, TEXT // 2, compiled=compiled) for compiled in (True, False))
    found: tuple[list[float], list[float]] = [], []
    for _ in range(ROUNDS):
        for sampler, seconds in zip((fast, slow), found, strict=True):
            slow._noise.forget_below(TEXT + 1)
            seconds.append(_timed(lambda sampler=sampler: sampler.choose(logits)))  # type: ignore[misc]
    compiled, numpy = (median(seconds) * 1e3 for seconds in found)
    return compiled, numpy


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.choice", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    vocabulary = parser.parse_args(arguments).vocabulary
    table = Table(title=f"One choice of {vocabulary:,} tokens, ms")
    for column in ("terms", "compiled", "numpy", "ratio", "flat row, compiled", "numpy"):
        table.add_column(column, justify="left" if column == "terms" else "right", no_wrap=column == "terms")
    for name, terms in SAMPLING_TERMS.items():
        (compiled, numpy), flat = (milliseconds(vocabulary, count, terms) for count in (min(50, vocabulary), 0))
        table.add_row(
            name, f"{compiled:.3f}", f"{numpy:.3f}", f"{numpy / compiled:.0f}", f"{flat[0]:.3f}", f"{flat[1]:.3f}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
