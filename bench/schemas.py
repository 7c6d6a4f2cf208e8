"""`python -m bench.schemas FOLDER`: are answers valid against JSON schemas that others wrote?

FOLDER is one of the JSON-Schema-Test-Suite, tests/draft2020-12. Its schemas are taken file by file in turns, until
enough can be followed; those that cannot are refused by name and counted. A cluster of router, verifier, drafter and
Redis answers within each of them, with speculation. The package `jsonschema` judges what ended by itself; how many
texts are those of plain decoding is counted, too. The last line:
`schemas: schemas=… outputs=… ended=… valid=… same=… refused=…`.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from jsonschema.validators import validator_for
from rich.console import Console

from bench.rows.cluster import running
from outrider.cli.command import reported
from outrider.cli.performance.load import read_prompts
from outrider.client import AsyncClient, FinishReason, Generation
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.core.answers.schemas import followable
from outrider.errors import ConfigError, InvalidRequest
from outrider.rpc.lifecycle import run_until_signal

AT_ONCE = 8
MAX_TOKENS = 400


class PublicSchema(NamedTuple):
    """A schema of the suite."""

    name: str  # the file, and what the suite calls it
    schema: Any


@dataclass
class SchemaFigures:
    """What came of the schemas."""

    followed: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    outputs: int = 0
    ended: int = 0  # by themselves
    same: int = 0  # as plain decoding
    invalid: list[str] = field(default_factory=list)  # schema and answer

    @property
    def last_line(self) -> str:
        """The line for scripts."""
        return (
            f"schemas: schemas={len(self.followed)} outputs={self.outputs} ended={self.ended} "
            f"valid={self.ended - len(self.invalid)} same={self.same} refused={self.refused.total()}"
        )


def main(
    folder: Annotated[Path, typer.Argument(help="tests/draft2020-12 of the JSON-Schema-Test-Suite.")],
    schemas: Annotated[int, typer.Option(min=1, help="Schemas that can be followed.")] = 50,
    outputs: Annotated[int, typer.Option(min=1, help="Answers of each.")] = 10,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    models: Annotated[Path, typer.Option(help="Folder that holds target/ and drafter/.")] = Path("models"),
    texts: Annotated[Path, typer.Option(help="JSON lines with an id and a prompt.")] = Path("examples/held_out.jsonl"),
) -> None:
    """Judge answers within JSON schemas that others wrote. Exits with status 1 if one is not valid, or differs."""
    figures, prompts = SchemaFigures(), [text for _, text in read_prompts(texts, "#short")]
    with reported():
        taken = in_turns(folder)
        run_until_signal(_measure(models, taken, schemas, outputs, temperature, prompts, figures))
    for reason, count in figures.refused.most_common():
        print(f"refused {count}: {reason}")
    for entry in figures.invalid:
        print(f"not valid: {entry}")
    print(figures.last_line, flush=True)
    raise SystemExit(bool(figures.invalid) or figures.same < figures.outputs)


def in_turns(folder: Path) -> Iterator[PublicSchema]:
    """Yield the first schema of each file, then the second ones, and so on. Raises ConfigError without any."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ConfigError(f"{folder}: has no JSON files; give tests/draft2020-12 of the JSON-Schema-Test-Suite")
    named = [
        [PublicSchema(f"{file.stem}: {case['description']}", case["schema"]) for case in json.loads(file.read_text())]
        for file in files
    ]
    return (schema for schema in chain.from_iterable(zip_longest(*named)) if schema is not None)


async def _measure(
    models: Path,
    taken: Iterator[PublicSchema],
    schemas: int,
    outputs: int,
    temperature: float,
    prompts: Sequence[str],
    figures: SchemaFigures,
) -> None:
    progress, target = Console(stderr=True, highlight=False), models / "target"
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}, overlap=True),
        verifier=[VerifierConfig(model=target, dtype="float32", slots=2 * AT_ONCE)],
        drafter=[DrafterConfig(model=models / "drafter", slots=2 * AT_ONCE)],
    )
    async with running(config) as cluster:
        for schema in taken:
            if len(figures.followed) == schemas:
                return
            progress.print(f"{len(figures.followed) + 1} of {schemas}: {schema.name}", markup=False)
            await judge(cluster.client, schema, outputs, temperature, prompts, figures)


async def judge(
    client: AsyncClient,
    public: PublicSchema,
    outputs: int,
    temperature: float,
    prompts: Sequence[str],
    figures: SchemaFigures,
) -> None:
    """Add the answers within one schema to the figures. One that answers are not held to as a whole has none."""
    with suppress(ValueError):  # the cluster refuses it
        for pointer in followable(public.schema).ignored[:1]:
            figures.refused[f"{pointer.rpartition('/')[2]} is not enforced"] += 1
            return
    room = asyncio.Semaphore(AT_ONCE)

    async def answer(number: int) -> tuple[Generation, Generation]:
        terms = {"schema": public.schema, "temperature": temperature, "seed": number, "max_tokens": MAX_TOKENS}
        prompt = prompts[number % len(prompts)]
        async with room:
            ours = await client.generate(prompt, speculation="fixed", timeout=120, **terms)
            return ours, await client.generate(prompt, speculation="off", timeout=120, **terms)

    try:
        answers = await asyncio.gather(*map(answer, range(outputs)))
    except InvalidRequest as error:
        figures.refused[str(error)] += 1
        return
    figures.followed.append(public.name)
    validator = validator_for(public.schema, default=validator_for({}))(public.schema)
    for ours, plain in answers:
        figures.outputs += 1
        figures.same += ours.token_ids == plain.token_ids
        if ours.finish_reason is FinishReason.STOP:
            figures.ended += 1
            if not validator.is_valid(json.loads(ours.text)):
                figures.invalid.append(f"{public.name}: {ours.text}")


if __name__ == "__main__":
    typer.run(main)
