"""`python -m bench.grammars`: what answers of a JSON schema cost, and what drafters make of them.

One cluster of router, verifier, drafter and Redis, one caller. Three rows take turns, prompt by prompt: plain decoding
of any text, plain decoding within the schema, and speculative decoding within it. Tokens a second count from the
first token to the last. The last line: `grammars: constrained_over_free=… speculative_over_plain=… valid=…/…`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.options import padded_model
from bench.rows.cluster import BenchCluster, running
from outrider.cli.command import parse_count, reported
from outrider.cli.performance.load import read_prompts
from outrider.client import Generation
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.rpc.lifecycle import run_until_signal

TOKENS = 200  # of an answer at most
SEED = 2024
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "function": {"type": "string", "maxLength": 24},
        "description": {"type": "string", "maxLength": 60},
        "arguments": {
            "type": "array",
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 16},
                    "type": {"enum": ["int", "float", "str", "list"]},
                    "optional": {"type": "boolean"},
                },
                "required": ["name", "type", "optional"],
                "additionalProperties": False,
            },
        },
        "returns": {"enum": ["nothing", "int", "float", "str", "list"]},
    },
    "required": ["function", "description", "arguments", "returns"],
    "additionalProperties": False,
}
ROWS: dict[str, dict[str, Any]] = {
    "any text": {"speculation": "off", "ignore_eos": True},
    "schema": {"speculation": "off", "schema": SCHEMA},
    "schema, speculative": {"schema": SCHEMA},
}

Answers = dict[str, list[Generation]]


def main(
    parameters: Annotated[str, typer.Option(help="Size to pad the target to.")] = "150M",
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, each with every row.")] = 24,
    models: Annotated[Path, typer.Option(help="Folder that holds target/ and drafter/.")] = Path("models"),
    texts: Annotated[Path, typer.Option(help="JSON lines with an id and a prompt.")] = Path("examples/held_out.jsonl"),
) -> None:
    """Measure plain and speculative decoding within a JSON schema."""
    answers: Answers = defaultdict(list)
    asked = [text for _, text in read_prompts(texts, "#short")]
    asked = [asked[index % len(asked)] for index in range(prompts)]
    with reported():
        run_until_signal(_measure(models, parse_count(parameters), asked, temperature, answers))
    _print(answers)
    print(last_line(answers), flush=True)


async def _measure(models: Path, parameters: int, asked: Sequence[str], temperature: float, answers: Answers) -> None:
    progress = Console(stderr=True, highlight=False)
    async with padded_model(models / "target", parameters) as target:
        config = ClusterConfig(
            router=RouterConfig(listen="127.0.0.1:0", models={"target": target}),
            verifier=[VerifierConfig(model=target, name="target", threads=2)],
            drafter=[DrafterConfig(model=models / "drafter", threads=1)],
        )
        async with running(config) as cluster:
            for row in ROWS:  # what is compiled, and learned first, is not measured
                await _answer(cluster, row, asked[0], temperature, SEED - 1)
            for index, prompt in enumerate(asked):
                progress.print(f"prompt {index + 1} of {len(asked)}")
                for row in ROWS:
                    answers[row].append(await _answer(cluster, row, prompt, temperature, SEED + index))


async def _answer(cluster: BenchCluster, row: str, prompt: str, temperature: float, seed: int) -> Generation:
    return await cluster.client.generate(
        prompt, temperature=temperature, seed=seed, max_tokens=TOKENS, timeout=600, **ROWS[row]
    )


def speed(answers: Sequence[Generation]) -> float:
    """Return the tokens per second of some answers together, from each one's first token on."""
    return sum(it.usage.completion_tokens - 1 for it in answers) / sum(it.usage.decode_s for it in answers)


def last_line(answers: Answers) -> str:
    """Return the line for scripts."""
    if not answers:
        return "grammars: -"
    free, plain, ours = (answers[row] for row in ROWS)
    ended = [it for it in (*plain, *ours) if it.finish_reason == "stop"]
    same = sum(one.token_ids == other.token_ids for one, other in zip(plain, ours, strict=True))
    return (
        f"grammars: constrained_over_free={speed(plain) / speed(free):.2f} "
        f"speculative_over_plain={speed(ours) / speed(plain):.2f} valid={sum(map(_is_valid, ended))}/{len(ended)} "
        f"same={same}/{len(ours)}"
    )


def _is_valid(answer: Generation) -> bool:
    """Return whether an answer has the schema's parts."""
    try:
        found = json.loads(answer.text)
    except ValueError:
        return False
    return isinstance(found, dict) and found.keys() == {*SCHEMA["required"]}


def _print(answers: Answers) -> None:
    table = Table(box=SIMPLE, show_edge=False)
    for name in ("", "tokens/s", "tokens, median", "acceptance length", "ended"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for row, given in answers.items():
        steps = sum(it.usage.steps for it in given)
        tokens = [it.usage.completion_tokens for it in given]
        ended = sum(it.finish_reason == "stop" for it in given)
        table.add_row(
            row, f"{speed(given):.1f}", f"{median(tokens):.0f}", f"{sum(tokens) / steps:.2f}", f"{ended}/{len(given)}"
        )
    Console(highlight=False).print(table)


if __name__ == "__main__":
    typer.run(main)
