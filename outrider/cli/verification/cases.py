"""The cases of `outrider verify`: chooses prompts and seeds, generates the texts, and compares them."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.cli.verification.compare import Difference, Verdict, difference, verdict
from outrider.cli.verification.distribution_check import LEVEL, p_value
from outrider.client import AsyncClient, Generation
from outrider.client._terms import grammar_of
from outrider.core.session.contract import LOSSY, SHARED_NOISE, Contract, RuleName
from outrider.engine.checkpoints.checkpoint import read_tokenizer
from outrider.errors import ConfigError, InternalError, Overloaded

if TYPE_CHECKING:
    from outrider.cli.verification.reference import Reference

Speculation = Literal["off", "fixed"]

HELD_OUT = Path("examples/held_out.jsonl")
MAX_WAIT_S = 120.0  # for capacity in a busy cluster


class VerifyPrompt(NamedTuple):
    """A text to continue."""

    name: str
    text: str
    tokens: tuple[int, ...]
    digest: bytes = b""  # of the tokenizer that the tokens belong to


@dataclass(frozen=True, slots=True)
class VerifyCase:
    """One prompt at one temperature with one seed, and the results."""

    prompt: VerifyPrompt
    temperature: float
    seed: int
    plain: Generation | None  # None: the speculative text is a separate sample, which no plain text has to equal
    speculative: Generation
    verdict: Verdict | None  # speculative against plain
    difference: Difference | None
    reference_verdict: Verdict | None  # both against transformers; None: not compared
    reference_difference: Difference | None
    quantiles: tuple[float, ...] = ()  # of a separate sample's tokens, in the target's distribution


def repeatable(rule: str, temperature: float) -> bool:
    """Return whether a text under the rule equals plain decoding's text, and does not only have its distribution."""
    return rule == SHARED_NOISE or temperature == 0.0


def check_rule(rule: str, temperatures: Sequence[float], *, with_reference: bool) -> None:
    """Raise ConfigError if texts under the rule cannot be verified.

    `with_reference`: texts are compared with transformers.
    """
    if rule in LOSSY:
        raise ConfigError(
            f"flags: rule: {rule} is lossy: its texts do not have the target's distribution, so they cannot be "
            "verified; give a lossless rule"
        )
    sampled = [temperature for temperature in temperatures if not repeatable(rule, temperature)]
    if sampled and not with_reference:
        raise ConfigError(
            f"flags: rule: at temperature {sampled[0]:g} a text under {rule} is a separate sample, not the text of "
            "plain decoding; only the probabilities of transformers can verify it: install transformers and leave out "
            "--no-reference, or give --temperature 0"
        )


def read_prompts(folder: Path, file: Path | None, texts: Sequence[str] | None, count: int) -> list[VerifyPrompt]:
    """Return prompts from the command line, else from a file, else from the held-out texts, in the checkpoint's tokens.

    Raises ConfigError for a file without prompts, CheckpointError for a folder without a tokenizer.
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
    return [VerifyPrompt(name, text, tuple(tokenizer.encode(text).ids), digest) for name, text in taken]


def quantiles_by_temperature(cases: Sequence[VerifyCase]) -> dict[float, NDArray[np.float64]]:
    """Return the quantiles of all tokens of separate samples, by temperature."""
    sampled = [case for case in cases if case.plain is None]
    return {
        temperature: np.array(
            [quantile for case in sampled if case.temperature == temperature for quantile in case.quantiles]
        )
        for temperature in dict.fromkeys(case.temperature for case in sampled)
    }


def follows_distribution(cases: Sequence[VerifyCase]) -> bool:
    """Return whether separate samples follow the target's distribution at every temperature, at level `LEVEL`.

    The level holds for all temperatures together (Bonferroni).
    """
    sampled = quantiles_by_temperature(cases)
    return all(p_value(quantiles) * len(sampled) >= LEVEL for quantiles in sampled.values())


def plan(
    prompts: Sequence[VerifyPrompt], temperatures: Sequence[float], seeds: int
) -> list[tuple[VerifyPrompt, float, int]]:
    """Return the prompts, temperatures and seeds to generate with.

    At temperature 0 the seed has no effect, so there is one. No two prompts share a seed: samples with the same seed at
    the same position are not independent.
    """
    return [
        (prompt, temperature, seed)
        for temperature in temperatures
        for first, prompt in enumerate(prompts)
        for seed in range(1 + first * seeds, 1 + first * seeds + (seeds if temperature else 1))
    ]


async def compare(
    client: AsyncClient,
    work: Sequence[tuple[VerifyPrompt, float, int]],
    reference: Reference | None,
    *,
    tolerance: float,
    rule: RuleName = SHARED_NOISE,
    model: str = "",
    constraint: Mapping[str, Any] | None = None,
    max_tokens: int = 64,
    concurrency: int = 4,
    timeout: float = 300.0,
) -> AsyncIterator[VerifyCase]:
    """Generate every case with and without speculation, `concurrency` texts at once, and compare. Wait for capacity.

    Under a rule and at a temperature whose texts are not `repeatable`, only the speculative text is generated, and the
    case has the quantiles of its tokens in the reference's distribution. All quantiles are tested together later.

    `constraint`: what every text has to be, as the client's options have it: {"regex": ...}, {"schema": ...}. Without
    one, texts go on after the model's end of text.

    Raises the client's errors: TokenizerMismatch when the prompts' tokens belong to another tokenizer than the served
    one.
    """
    capacity, reference_lock = asyncio.Semaphore(concurrency), asyncio.Lock()
    constraint = constraint or {}

    async def generate(prompt: VerifyPrompt, temperature: float, seed: int, speculation: Speculation) -> Generation:
        give_up = time.monotonic() + MAX_WAIT_S
        while True:
            try:
                return await client.generate(
                    prompt.tokens,
                    tokenizer_digest=prompt.digest,
                    model=model,
                    temperature=temperature,
                    seed=seed,
                    max_tokens=max_tokens,
                    ignore_eos=not constraint,
                    speculation=speculation,
                    rule=rule if speculation == "fixed" else SHARED_NOISE,
                    timeout=timeout,
                    **constraint,
                )
            except Overloaded as error:
                if time.monotonic() + error.retry_after > give_up:
                    raise
                await asyncio.sleep(error.retry_after)

    async def sampled_case(prompt: VerifyPrompt, contract: Contract, text: Generation) -> VerifyCase:
        if reference is None:
            raise InternalError(f"nothing can verify a text under {rule} at temperature {contract.temperature:g}")
        async with reference_lock:
            generator = np.random.default_rng(contract.seed)
            found = await asyncio.to_thread(reference.quantiles, prompt.tokens, text.token_ids, contract, generator)
        impossible = np.flatnonzero(np.isnan(found)).tolist()
        first = Difference(impossible[0], text.token_ids[impossible[0]], None, math.inf) if impossible else None
        outcome = Verdict.BUG if impossible else None
        quantiles = tuple(found[~np.isnan(found)].tolist())
        return VerifyCase(
            prompt, contract.temperature, contract.seed, None, text, None, None, outcome, first, quantiles
        )

    async def run_case(prompt: VerifyPrompt, temperature: float, seed: int) -> VerifyCase:
        async def generate_with(speculation: Speculation) -> Generation:
            async with capacity:
                return await generate(prompt, temperature, seed, speculation)

        contract = Contract(seed=seed, max_tokens=max_tokens, temperature=temperature, grammar=grammar_of(constraint))
        if not repeatable(rule, temperature):
            return await sampled_case(prompt, contract, await generate_with("fixed"))
        # "fixed", because other policies speculate only where it pays, and then few steps would verify drafts.
        speculating = asyncio.create_task(generate_with("fixed"))
        try:
            plain = await generate_with("off")
            speculative = await speculating
        finally:
            speculating.cancel()
        reference_verdict, worst = None, None
        if reference is not None:
            texts = dict.fromkeys((plain.token_ids, speculative.token_ids))  # one entry if the two are equal
            async with reference_lock:
                found = [
                    await asyncio.to_thread(reference.difference, prompt.tokens, tokens, contract, tolerance)
                    for tokens in texts
                ]
            # A wrong text is worse than a near tie.
            worst = max(filter(None, found), key=lambda entry: entry.gap, default=None)
            reference_verdict = worst.judged(tolerance) if worst else Verdict.IDENTICAL
        between = difference(plain.token_ids, speculative.token_ids, plain.gaps, speculative.gaps)
        outcome = verdict(plain, speculative, tolerance)
        return VerifyCase(prompt, temperature, seed, plain, speculative, outcome, between, reference_verdict, worst)

    tasks = [asyncio.create_task(run_case(*case)) for case in work]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
