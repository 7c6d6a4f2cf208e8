"""What the mask of a grammar costs at a large vocabulary: the ids that may follow, at every place of an answer.

`python -m bench.engine.masks [--vocabulary N]` trains a byte-pair tokenizer of N ids on the Python files of this
environment (a minute or two), because a mask's time depends on how long tokens are, and prints a table: microseconds of
one mask, of the question whether one id may follow, and of what the grammar forces, for a JSON schema, a regular
expression, and free text before a schema. Masks of the root and the likely path are computed while a pass runs; for
other rows, ids are asked about one by one first.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.grammars import SCHEMA
from outrider.core.session.contract import Grammar
from outrider.grammar.compiler import GrammarCompiler

VOCABULARY = 151_936  # of Qwen2.5 and Qwen3
TEXT_BYTES = 60_000_000  # size of the text that the tokenizer is trained on
ANSWER = json.dumps(
    {
        "function": "add_one_and_two",
        "description": "Adds both numbers and returns their sum.",
        "arguments": [{"name": "first", "type": "int", "optional": True}],
        "returns": "int",
    }
)
CASES = {
    "JSON schema": (Grammar("json_schema", json.dumps(SCHEMA)), ANSWER),
    "regular expression": (Grammar("regex", r"[A-Z][a-z]+( [a-z]+){3,40}\."), "The quick brown fox jumps over a dog."),
    "reasoning before a schema": (Grammar("json_schema", json.dumps(SCHEMA), "opened"), f"So it adds.</think>{ANSWER}"),
}


def sources() -> Iterator[str]:
    """Yield Python files of this environment, up to TEXT_BYTES."""
    left = TEXT_BYTES
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        left -= len(text)
        if left < 0:
            return
        yield text


def make_tokenizer(vocabulary: int) -> Tokenizer:
    """Train a byte-pair tokenizer with at most `vocabulary` ids, 0 being the end of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=1,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(sources(), trainer)
    return tokenizer


class Times(NamedTuple):
    """Microseconds at every place of an answer."""

    masks: list[float]
    single: list[float]  # whether one id may follow
    forced: list[float]


def microseconds(compiler: GrammarCompiler, grammar: Grammar, tokens: Sequence[int]) -> Times:
    """Return the times at every place of an answer."""
    times = Times([], [], [])
    state = compiler.start(grammar)
    for token in tokens:
        began = time.perf_counter()
        allows = bool(state.first_allowed((), (token,), 1))
        asked = time.perf_counter()
        allowed = state.allowed(())
        masked = time.perf_counter()
        state.forced()
        for found, seconds in zip(times, (masked - asked, asked - began, time.perf_counter() - masked), strict=True):
            found.append(seconds * 1e6)
        assert allows
        assert allowed[token]
        state.extend([token])
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--vocabulary", type=int, default=VOCABULARY, help="ids of the tokenizer (default: %(default)s)"
    )
    vocabulary = parser.parse_args().vocabulary
    table = Table(title=f"Microseconds at {vocabulary:,} ids")
    for column in ("grammar", "places", "a mask: median", "90 %", "one id: median", "90 %", "forced: median"):
        table.add_column(column, justify="left" if column == "grammar" else "right")
    Console(stderr=True).print(f"training a tokenizer of {vocabulary:,} ids")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(vocabulary)
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        compiler = GrammarCompiler(Path(folder), vocabulary, [0])
        for name, (grammar, text) in CASES.items():
            tokens = tokenizer.encode(text).ids
            microseconds(compiler, grammar, [*islice(tokens, 2)])  # compiled before it is measured
            masks, single, forced = microseconds(compiler, grammar, tokens)
            spread = [np.quantile(times, share) for times in (masks, single) for share in (0.5, 0.9)]
            figures = (*spread, np.median(forced))
            table.add_row(name, str(len(tokens)), *(f"{figure:.0f}" for figure in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
