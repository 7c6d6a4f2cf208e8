"""Texts made in several ways, for `outrider verify`: which, how they are asked for, and how they compare."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.cli.compare import Difference, Verdict, difference, verdict
from outrider.cli.law import LEVEL, p_value
from outrider.cli.tokenizers import read_tokenizer
from outrider.client import AsyncClient, Generation
from outrider.core.contract import LOSSY, SHARED_NOISE, Contract, RuleName
from outrider.errors import ConfigError, InternalError, Overloaded

if TYPE_CHECKING:
    from outrider.cli.reference import Reference

Speculation = Literal["off", "fixed"]

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
    plain: Generation | None  # None: the speculative text is a draw of its own, and there is no text to equal
    speculative: Generation
    verdict: Verdict | None  # speculative against plain
    parted: Difference | None
    reference_verdict: Verdict | None  # both against transformers; None: not compared
    reference_parted: Difference | None
    places: tuple[float, ...] = ()  # of a draw's tokens in the target's law


def repeatable(rule: str, temperature: float) -> bool:
    """Whether a text under that rule is plain decoding's own text, and not just distributed as that."""
    return rule == SHARED_NOISE or temperature == 0.0


def check_rule(rule: str, temperatures: Sequence[float], *, judged: bool) -> None:
    """`judged`: whether texts are held against transformers. Raises ConfigError for what cannot be verified."""
    if rule in LOSSY:
        raise ConfigError(
            f"flags: rule: {rule} is lossy: its texts are not distributed as the target's own, and there is nothing "
            "that they could be held against"
        )
    drawn = [temperature for temperature in temperatures if not repeatable(rule, temperature)]
    if drawn and not judged:
        raise ConfigError(
            f"flags: rule: at temperature {drawn[0]:g} a text under {rule} is a draw of its own, not plain decoding's "
            "text; only transformers' probabilities can judge it: install transformers and leave --no-reference out, "
            "or give --temperature 0"
        )


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


def drawn_places(cases: Sequence[Case]) -> dict[float, NDArray[np.float64]]:
    """The places of all tokens that were drawn, by temperature."""
    drawn = [case for case in cases if case.plain is None]
    return {
        heat: np.array([place for case in drawn if case.temperature == heat for place in case.places])
        for heat in dict.fromkeys(case.temperature for case in drawn)
    }


def follows(cases: Sequence[Case]) -> bool:
    """Whether what was drawn follows the target's law at every temperature: one test of `LEVEL` for all together."""
    drawn = drawn_places(cases)
    return all(p_value(places) * len(drawn) >= LEVEL for places in drawn.values())


def plan(prompts: Sequence[Prompt], temperatures: Sequence[float], seeds: int) -> list[tuple[Prompt, float, int]]:
    """What to generate: at temperature 0 a seed changes nothing, so there is one. No two prompts share a seed: draws
    from the same seed at the same place are not independent.
    """
    return [
        (prompt, temperature, seed)
        for temperature in temperatures
        for first, prompt in enumerate(prompts)
        for seed in range(1 + first * seeds, 1 + first * seeds + (seeds if temperature else 1))
    ]


async def compare(
    client: AsyncClient,
    work: Sequence[tuple[Prompt, float, int]],
    reference: Reference | None,
    *,
    tolerance: float,
    rule: RuleName = SHARED_NOISE,
    model: str = "",
    max_tokens: int = 64,
    concurrency: int = 4,
    timeout: float = 300.0,
) -> AsyncIterator[Case]:
    """Generates every case both ways, some at once, and judges it. Waits for room where the cluster is full.

    Under a rule and at a temperature whose texts are not `repeatable` there is the speculative way alone, and the
    places of its tokens in the reference's law, to be judged together.

    Raises what the client raises: TokenizerMismatch when the prompts' tokens are not of the tokenizer that is served.
    """
    room, judging = asyncio.Semaphore(concurrency), asyncio.Lock()

    async def generate(prompt: Prompt, temperature: float, seed: int, speculation: Speculation) -> Generation:
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
                    rule=rule if speculation == "fixed" else SHARED_NOISE,
                    timeout=timeout,
                )
            except Overloaded as error:
                if time.monotonic() + error.retry_after > give_up:
                    raise
                await asyncio.sleep(error.retry_after)

    async def place(prompt: Prompt, contract: Contract, drawn: Generation) -> Case:
        if reference is None:
            raise InternalError(f"nothing can judge a text under {rule} at temperature {contract.temperature:g}")
        async with judging:
            dice = np.random.default_rng(contract.seed)
            found = await asyncio.to_thread(reference.places, prompt.tokens, drawn.token_ids, contract, dice)
        lost = np.flatnonzero(np.isnan(found)).tolist()
        parted = Difference(lost[0], drawn.token_ids[lost[0]], None, math.inf) if lost else None
        judged = Verdict.BUG if lost else None
        places = tuple(found[~np.isnan(found)].tolist())
        return Case(prompt, contract.temperature, contract.seed, None, drawn, None, None, judged, parted, places)

    async def one(prompt: Prompt, temperature: float, seed: int) -> Case:
        async def way(speculation: Speculation) -> Generation:
            async with room:
                return await generate(prompt, temperature, seed, speculation)

        contract = Contract(seed=seed, max_tokens=max_tokens, temperature=temperature)
        if not repeatable(rule, temperature):
            return await place(prompt, contract, await way("fixed"))
        # "fixed", because other policies speculate only where it pays, and then much would not be verified at all.
        speculating = asyncio.create_task(way("fixed"))
        try:
            plain = await way("off")
            speculative = await speculating
        finally:
            speculating.cancel()
        judged, parted = None, None
        if reference is not None:
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
