"""Several tiers of drafters against fewer tiers: each set has a separate cluster, in turn with plain decoding there.

The verifier's numerics are invariant, so every text must be plain decoding's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from bench.options import SEED, BenchOptions, padded
from bench.report.figures import BenchResults, Measurement, SettlingTime
from bench.rows.cluster import ClusterRow, running
from bench.rows.engine_time import PAGE
from bench.rows.requests import BenchRequest
from outrider.config import ClusterConfig, DrafterConfig, parse
from outrider.errors import InternalError

MID = 100_000_000  # parameters that the middle model is padded to
JUDGED = 24  # nodes that a drafter with a tier below it scores in one pass
LEARNING_TOKENS = 512  # tokens that a row generates at each temperature before it is measured
TRIALS = 20  # generations, at most, in which the router measures which tiers pay
MEASURED = "measured"  # the row in which it does so; in the other rows all tiers draft
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
    """Return the name of a set of tiers; the first one drafts for the target."""
    return " < ".join(tiers)


def beside(row: str) -> str:
    """Return the name of the row of plain decoding in the same cluster."""
    return f"plain beside {row}"


async def run_tiers(options: BenchOptions, results: BenchResults, prompts: Prompts, report: Any) -> None:
    """Measure every set of tiers once in each repetition; the order rotates."""
    for target in options.targets:
        title = f"tiers, {target / 1e6:.0f}M"
        report(f"{title}: padding the models")
        async with AsyncExitStack() as stack:
            folder = await stack.enter_async_context(padded(options, target))
            mid = await stack.enter_async_context(padded(options, MID, "mid"))
            rows = [(name_of(tiers), options_of(options, folder, mid, tiers, "all")) for tiers in SETS]
            rows.append((MEASURED, options_of(options, folder, mid, SETS[-1], MEASURED)))
            for repetition in range(options.repetitions):
                for name, config in rows:
                    report(f"{title}: repetition {repetition + 1} of {options.repetitions}: {name}")
                    results.tiers += await _measure(options, config, name, target, repetition, prompts, results)
                rows = rows[1:] + rows[:1]


def options_of(options: BenchOptions, target: Path, mid: Path, tiers: Sequence[str], chosen: str) -> ClusterConfig:
    """Return a cluster with these tiers; the first one drafts for the target."""
    config = options.cluster(target)
    (drafter,), (verifier,) = config.drafter, config.verifier
    plain = drafter.model_dump(exclude={"tier", "above"})
    kinds: dict[str, dict[str, Any]] = {
        "suffix": {"drafts": "suffix"},
        "drafter": {"level_nodes": JUDGED if tiers[-1] != "drafter" else drafter.level_nodes},
        "mid": {"model": mid, "level_nodes": JUDGED, "threads": verifier.threads},  # it and the verifier take turns
    }
    sections = {
        number: [parse(DrafterConfig, plain | kinds[kind] | {"tier": number}, "--drafter")]
        for number, kind in enumerate(tiers)
    }
    router = config.router.model_copy(update={"tiers": chosen, **PAGE})
    verifier = verifier.model_copy(update={"numerics": "invariant"})
    return config.model_copy(update={"router": router, "verifier": [verifier], "drafter": [], "tier": sections})


async def _settle(options: BenchOptions, row: ClusterRow, prompts: Prompts, temperature: float) -> float | None:
    """Generate until the router has chosen among the tiers. Return the seconds of decoding; None if it has not."""
    seconds = 0.0
    for trial in range(TRIALS):
        _, tokens = prompts[trial % len(prompts)]
        sample = await row.generate(BenchRequest(tokens, temperature, SEED - 1 - trial, 2 * options.max_tokens))
        seconds += sample.arrivals[-1]
        known = (await row.cluster.control("router"))["tiers"]
        if any(it["settled"] and it["greedy"] is (temperature == 0.0) and len(it["present"]) > 2 for it in known):
            return seconds
    return None


async def _measure(
    options: BenchOptions,
    config: ClusterConfig,
    name: str,
    target: int,
    repetition: int,
    prompts: Prompts,
    results: BenchResults,
) -> list[Measurement]:
    """Measure plain and speculative decoding in turn, after the generations from which the cluster learns."""
    takes = []
    async with running(config) as cluster:
        drafted, plain = ClusterRow(name, cluster, None), ClusterRow(beside(name), cluster, "off")
        for temperature in options.temperatures:
            if name == MEASURED:
                seconds = await _settle(options, drafted, prompts, temperature)
                results.settling.append(SettlingTime(target, repetition, temperature, seconds))
            else:
                await drafted.generate(BenchRequest(prompts[0][1], temperature, SEED - 1, LEARNING_TOKENS))
        for number, (prompt, tokens) in enumerate(prompts):
            for temperature in options.temperatures:
                request = BenchRequest(tokens, temperature, SEED + number, options.max_tokens)
                pair = [plain, drafted]
                samples = {row.name: await row.generate(request) for row in pair}
                if samples[plain.name].tokens != samples[name].tokens:
                    raise InternalError(f"{name}: the text after {prompt} differs from that of plain decoding")
                takes += [
                    Measurement(target, row.name, prompt, repetition, temperature, samples[row.name]) for row in pair
                ]
    return takes
