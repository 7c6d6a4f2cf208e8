"""Tiers of drafters against fewer of them: each set in a cluster of its own, in turn, beside plain decoding there.

The verifier's numerics are invariant, so every text must be plain decoding's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.asking import Ask
from bench.cluster import ClusterRow, running
from bench.figures import Results, Take
from bench.options import SEED, Options, padded
from outrider.config import ClusterConfig, DrafterConfig, parse
from outrider.errors import InternalError

MID = 100_000_000  # parameters that the middle model is padded to
JUDGED = 24  # nodes that a drafter with a tier below it judges in one pass
LEARNING_TOKENS = 512  # that a row says at each temperature before it is measured
TRIALS = 20  # generations in which the router finds out which tiers pay
MEASURED = "measured"  # the row in which it does; in the others all draft
SETS = (
    ("suffix",),
    ("drafter",),
    ("mid",),
    ("drafter", "suffix"),
    ("mid", "drafter"),
    ("mid", "drafter", "suffix"),
)

Prompts = Sequence[tuple[str, tuple[int, ...]]]


def name_of(tiers: Sequence[str]) -> str:
    """The one that drafts for the target first."""
    return " < ".join(tiers)


def beside(row: str) -> str:
    """The row of plain decoding in the same cluster."""
    return f"plain beside {row}"


async def run_tiers(options: Options, results: Results, prompts: Prompts, say: Any) -> None:
    """Every set of tiers in turn, so often as there are repetitions; the order rotates."""
    for target in options.targets:
        title = f"tiers, {target / 1e6:.0f}M"
        say(f"{title}: padding the models")
        async with AsyncExitStack() as stack:
            folder = await stack.enter_async_context(padded(options, target))
            mid = await stack.enter_async_context(padded(options, MID, "mid"))
            rows = [(name_of(tiers), options_of(options, folder, mid, tiers, "all")) for tiers in SETS]
            rows.append((MEASURED, options_of(options, folder, mid, SETS[-1], MEASURED)))
            for repetition in range(options.repetitions):
                for name, config in rows:
                    say(f"{title}: repetition {repetition + 1} of {options.repetitions}: {name}")
                    results.tiers += await _measure(options, config, name, target, repetition, prompts)
                rows = rows[1:] + rows[:1]


def options_of(options: Options, target: Path, mid: Path, tiers: Sequence[str], chosen: str) -> ClusterConfig:
    """A cluster with these tiers, the first of which drafts for the target."""
    config = options.cluster(target)
    (drafter,), (verifier,) = config.drafter, config.verifier
    plain = drafter.model_dump(exclude={"tier", "above"})
    kinds: dict[str, dict[str, Any]] = {
        "suffix": {"drafts": "suffix"},
        "drafter": {"level_nodes": JUDGED if tiers[-1] != "drafter" else drafter.level_nodes},
        "mid": {"model": mid, "level_nodes": JUDGED, "threads": verifier.threads},  # they take turns
    }
    sections = {
        number: [parse(DrafterConfig, plain | kinds[kind] | {"tier": number}, "--drafter")]
        for number, kind in enumerate(tiers)
    }
    router = config.router.model_copy(update={"tiers": chosen})
    verifier = verifier.model_copy(update={"numerics": "invariant"})
    return config.model_copy(update={"router": router, "verifier": [verifier], "drafter": [], "tier": sections})


async def _measure(
    options: Options, config: ClusterConfig, name: str, target: int, repetition: int, prompts: Prompts
) -> list[Take]:
    """Plain and drafted in turn, after what has to be learned."""
    takes = []
    async with running(config) as cluster:
        drafted, plain = ClusterRow(name, cluster, None), ClusterRow(beside(name), cluster, "off")
        for temperature in options.temperatures:
            if name == MEASURED:
                for trial in range(TRIALS):
                    _, tokens = prompts[trial % len(prompts)]
                    await drafted.generate(Ask(tokens, temperature, SEED - 1 - trial, 2 * options.max_tokens))
            else:
                await drafted.generate(Ask(prompts[0][1], temperature, SEED - 1, LEARNING_TOKENS))
        for number, (prompt, tokens) in enumerate(prompts):
            for temperature in options.temperatures:
                ask = Ask(tokens, temperature, SEED + number, options.max_tokens)
                pair = [plain, drafted]
                samples = {row.name: await row.generate(ask) for row in pair}
                if samples[plain.name].tokens != samples[name].tokens:
                    raise InternalError(f"{name}: the text after {prompt} is another than plain decoding's")
                takes += [Take(target, row.name, prompt, repetition, temperature, samples[row.name]) for row in pair]
    return takes
