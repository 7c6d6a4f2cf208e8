"""Texts made in several ways, for `outrider verify`: which, how they are asked for, and how they compare."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from outrider.cli.compare import Difference, Verdict, difference, verdict
from outrider.cli.tokenizers import read_tokenizer
from outrider.client import AsyncClient, Generation
from outrider.core.contract import Contract
from outrider.errors import ConfigError, Overloaded

if TYPE_CHECKING:
    from outrider.cli.reference import Reference

HELD_OUT = Path("examples/held_out.jsonl")
PATIENCE_S = 120.0  # for a place in a cluster that is busy


class Prompt(NamedTuple):
    """A text to continue."""

    name: str
    text: str
    tokens: tuple[int, ...]
    digest: bytes = b""  # of the tokenizer that made them


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt at one temperature with one seed, and what came of it."""

    prompt: Prompt
    temperature: float
    seed: int
    plain: Generation
    speculative: Generation
    verdict: Verdict  # speculative against plain
    parted: Difference | None
    reference_verdict: Verdict | None  # both against transformers; None: not compared
    reference_parted: Difference | None


def read_prompts(folder: Path, file: Path | None, texts: Sequence[str] | None, count: int) -> list[Prompt]:
    """Prompts from the command line, else from a file, else the held-out ones, in the checkpoint's own tokens.

    Raises ConfigError for a file that is none, CheckpointError for a folder without a tokenizer.
    """
    tokenizer, digest = read_tokenizer(folder)
    named = [(f"prompt-{number}", text) for number, text in enumerate(texts or (), 1)]
    if not named:
        source = file or HELD_OUT
        try:
            lines = source.read_text(encoding="utf-8").splitlines()
            named = [(entry["id"], entry["prompt"]) for entry in map(json.loads, lines)]
        except OSError as error:
            raise ConfigError(f"{source}: {error.strerror}; give --prompt, or --prompts with a file") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{source}: must hold JSON lines with an id and a prompt") from None
        if file is None:
            named = [(name, text) for name, text in named if name.endswith("#short")]
    taken = named[: len(texts or ()) or count]
    return [Prompt(name, text, tuple(tokenizer.encode(text).ids), digest) for name, text in taken]


def plan(prompts: Sequence[Prompt], temperatures: Sequence[float], seeds: int) -> list[tuple[Prompt, float, int]]:
    """What to generate: at temperature 0 a seed changes nothing, so there is one."""
    return [
        (prompt, temperature, seed)
        for temperature in temperatures
        for prompt in prompts
        for seed in range(1, 1 + (seeds if temperature else 1))
    ]


async def compare(
    client: AsyncClient,
    work: Sequence[tuple[Prompt, float, int]],
    reference: Reference | None,
    *,
    tolerance: float,
    model: str = "",
    max_tokens: int = 64,
    concurrency: int = 4,
    timeout: float = 300.0,
) -> AsyncIterator[Case]:
    """Generates every case both ways, some at once, and judges it. Waits for room where the cluster is full.

    Raises what the client raises: TokenizerMismatch when the prompts' tokens are not of the tokenizer that is served.
    """
    room, judging = asyncio.Semaphore(concurrency), asyncio.Lock()

    async def generate(
        prompt: Prompt, temperature: float, seed: int, speculation: Literal["off", "fixed"]
    ) -> Generation:
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                return await client.generate(
                    prompt.tokens,
                    tokenizer_digest=prompt.digest,
                    model=model,
                    temperature=temperature,
                    seed=seed,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    speculation=speculation,
                    timeout=timeout,
                )
            except Overloaded as error:
                if time.monotonic() + error.retry_after > give_up:
                    raise
                await asyncio.sleep(error.retry_after)

    async def one(prompt: Prompt, temperature: float, seed: int) -> Case:
        async def way(speculation: Literal["off", "fixed"]) -> Generation:
            async with room:
                return await generate(prompt, temperature, seed, speculation)

        # "fixed", because other policies speculate only where it pays, and then much would not be verified at all.
        speculating = asyncio.create_task(way("fixed"))
        try:
            plain = await way("off")
            speculative = await speculating
        finally:
            speculating.cancel()
        judged, parted = None, None
        if reference is not None:
            contract = Contract(seed=seed, max_tokens=max_tokens, temperature=temperature)
            texts = dict.fromkeys((plain.token_ids, speculative.token_ids))  # the second only where it is another
            async with judging:
                found = [
                    await asyncio.to_thread(reference.difference, prompt.tokens, tokens, contract, tolerance)
                    for tokens in texts
                ]
            # A wrong text is worse than a near tie.
            parted = max(filter(None, found), key=lambda entry: entry.gap, default=None)
            judged = parted.judged(tolerance) if parted else Verdict.IDENTICAL
        between = difference(plain.token_ids, speculative.token_ids, plain.gaps, speculative.gaps)
        outcome = verdict(plain, speculative, tolerance)
        return Case(prompt, temperature, seed, plain, speculative, outcome, between, judged, parted)

    tasks = [asyncio.create_task(one(*case)) for case in work]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
