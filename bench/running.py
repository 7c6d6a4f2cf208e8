"""The suites: which rows get which requests, in which order."""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.distance import run_distance as measure_distance
from bench.engine.formats import measure_formats
from bench.engine.passes import measure_passes
from bench.engine.roofline import Limit, measure
from bench.options import SEED, BenchOptions, padded
from bench.peers.checkouts import llama_server_row
from bench.peers.llama_cpp import llama_worker, rows_of_worker
from bench.report.figures import BenchResults, ColdFigures, LoadFigures, Measurement, RowMemory, StepProfile
from bench.rows.cluster import ClusterRow, running
from bench.rows.processes import output, peak_mb, resident_mb
from bench.rows.requests import BenchRequest
from bench.rows.row import WORKERS, BenchRow, Models, worker_row
from bench.tiers import run_tiers as measure_tiers
from outrider.cli.performance.load import Load, apply_load
from outrider.cli.performance.samples import acceptance_length, percentile
from outrider.core.session.contract import PolicyName
from outrider.example_files import SMOLLM2, real_file
from outrider.v1.verifier_pb2 import VerifierDescription

WARM_UP_TOKENS = 24
LEARNING = ("in-process", "distributed")  # rows that measure which overlap mode is fastest
SHARED = ("plain", "distributed")  # rows of one cluster
LEARNING_TOKENS = 512  # tokens that these rows need for that
SPARE_SLOTS = 4  # for sessions of the previous measurement that have not ended yet
ANSWER_TOKENS = 48  # suite load
COLD_S = 10.0  # of a cluster that has just begun
ALTERNATED: tuple[tuple[PolicyName | None, ...], ...] = (("off", None), (None, "off"))
SALTS = 1000  # number of token ids of which one is put before a prompt, so that no cached KV fits

Prompts = Sequence[tuple[str, tuple[int, ...]]]
Report = Callable[[str], None]  # receives the current activity


async def run_rows(options: BenchOptions, results: BenchResults, report: Report) -> None:
    """Measure every row, one session at a time, interleaved, so that other work on the machine affects all rows."""
    *prompts, familiar = _encoded(options, options.fresh)
    learning = dict.fromkeys(LEARNING, LEARNING_TOKENS)
    learning |= dict.fromkeys((*options.rules, *options.drafts), options.learning_tokens)
    for target in options.targets:
        name = f"rows, {target / 1e6:.0f}M"
        report(f"{name}: padding the target")
        async with padded(options, target) as folder, open_rows(options, folder, name, report) as rows:
            report(f"{name}: measuring the machine's limit")
            limit = await measure(options.threads)
            for row in rows:
                report(f"{name}: warming {row.name} up")
                warm_up = learning.get(row.name, WARM_UP_TOKENS)
                for temperature in options.temperatures:
                    await row.generate(BenchRequest(familiar[1], temperature, SEED - 1, warm_up))
            async for take in interleaved(options, rows, prompts, target, report):
                results.takes.append(take)
            report(f"{name}: first tokens")
            results.firsts += await _first_tokens(rows, prompts[: len(options.short)], target)
            report(f"{name}: measuring the machine's limit again")
            limit = results.limits[target] = limit.better(await measure(options.threads))
            for row in rows:
                if isinstance(row, ClusterRow) and row.name in SHARED:
                    report(f"{name}: where {row.name} spends its steps")
                    results.profiles.append(await _profile(options, row, prompts, target, limit))
            results.memory += await _memory(target, rows)


async def interleaved(
    options: BenchOptions, rows: Sequence[BenchRow], prompts: Prompts, target: int, report: Report
) -> AsyncIterator[Measurement]:
    """Run each row once for every repetition, prompt and temperature, in an order that rotates.

    If there are enough prompts, none is repeated: drafters that remember outputs would know the answer.
    """
    order, each = list(rows), len(prompts) // options.repetitions
    for repetition in range(options.repetitions):
        for number in range(repetition * each, (repetition + 1) * each):
            prompt, tokens = prompts[number]
            for temperature in options.temperatures:
                request = BenchRequest(tokens, temperature, SEED + number, options.max_tokens)
                for row in order:
                    turn = (
                        f"repetition {repetition + 1} of {options.repetitions}, {prompt}, temperature {temperature:g}"
                    )
                    report(f"{turn}: {row.name}")
                    yield Measurement(target, row.name, prompt, repetition, temperature, await row.generate(request))
                order = order[1:] + order[:1]


async def _first_tokens(rows: Sequence[BenchRow], prompts: Prompts, target: int) -> list[Measurement]:
    """Generate one token after each prompt, with a first token for which no row has cached KV."""
    dice = random.Random(SEED)
    takes = []
    for number, (prompt, tokens) in enumerate(prompts):
        for row in rows:
            request = BenchRequest((dice.randrange(SALTS), *tokens), 0.0, SEED + number, 1)
            takes.append(Measurement(target, row.name, prompt, 0, 0.0, await row.generate(request)))
    return takes


async def run_load(options: BenchOptions, results: BenchResults, report: Report) -> None:
    """Measure plain and distributed in turn under the same loads: short and long prompts, all temperatures mixed."""
    prompts = [tokens for _, tokens in _encoded(options, (*options.short, *options.long))]
    target = options.targets[0]
    report("load: padding the target")
    async with padded(options, target) as folder:
        limit = results.limits.get(target) or await measure(options.threads)
        slots = max(options.callers) + SPARE_SLOTS
        config = options.cluster(folder, slots=slots)
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(running(config))
            order = [ClusterRow("plain", cluster, "off"), ClusterRow("distributed", cluster, None)]
            for arm in options.arms:
                report(f"load: starting a cluster for the arm {arm}")
                pinned = options.cluster(folder, slots=slots, arm=arm)
                order.append(ClusterRow(arm, await stack.enter_async_context(running(pinned)), None))
            for row in order:
                await row.generate(BenchRequest(prompts[0], 0.0, SEED, WARM_UP_TOKENS))
            for callers in options.callers:
                for repetition in range(options.repetitions):
                    load = _load(options, prompts, callers, repetition)
                    for row in order:
                        report(
                            f"load: {callers} callers, repetition {repetition + 1} of {options.repetitions}: "
                            f"{row.name} ({load.ramp_s + load.seconds:.0f} s)"
                        )
                        result = await apply_load(row.cluster.client, load, speculation=row.speculation)
                        gaps = [gap for sample in result.samples for gap in sample.gaps]
                        results.loads.append(
                            LoadFigures(
                                target,
                                row.name,
                                callers,
                                repetition,
                                result.goodput,
                                len(result.samples),
                                acceptance_length(result.samples),
                                percentile((sample.first_token_s for sample in result.samples), 50),
                                percentile(gaps, 50),
                                percentile(gaps, 99),
                                profile_of(await row.cluster.describe(), target, row.name, limit),
                            )
                        )
                    order.reverse()
        for callers in options.callers:
            for repetition in range(options.repetitions):
                report(f"load: {callers} callers, a cold cluster {repetition + 1} of {options.repetitions}")
                load = replace(_load(options, prompts, callers, repetition), seconds=COLD_S, ramp_s=0.0)
                goodput: dict[PolicyName | None, float] = {}
                for speculation in ALTERNATED[repetition % 2]:  # each in a cluster that is cold, too
                    async with running(config) as cluster:
                        result = await apply_load(cluster.client, load, speculation=speculation)
                    goodput[speculation] = result.goodput
                results.cold.append(ColdFigures(target, callers, repetition, goodput[None], goodput["off"]))


def _load(options: BenchOptions, prompts: Sequence[Sequence[int]], callers: int, repetition: int) -> Load:
    return Load(
        prompts,
        callers,
        options.load_s,
        options.ramp_s,
        ANSWER_TOKENS,
        options.temperatures,
        seed=SEED + repetition,
        salts=SALTS,
    )


async def run_distance(options: BenchOptions, results: BenchResults, report: Report) -> None:
    """Measure a distant drafter, over several links."""
    await measure_distance(options, results, _encoded(options, options.short), report)


async def run_tiers(options: BenchOptions, results: BenchResults, report: Report) -> None:
    """Measure several tiers of drafters against fewer tiers."""
    await measure_tiers(options, results, _encoded(options, options.short), report)


async def run_passes(options: BenchOptions, results: BenchResults, report: Report) -> None:
    """Measure passes of our engine and of llama.cpp, by their number of rows."""
    for target in options.targets:
        results.passes += await measure_passes(options, target, report)


async def run_formats(options: BenchOptions, results: BenchResults, report: Report) -> None:
    """Measure quantized types: a file as it is, and padded."""
    report("formats: fetching a model, where the cache lacks it")
    file = await asyncio.to_thread(real_file, SMOLLM2) if options.gguf is None else options.gguf
    for target in (None, *options.formats):
        results.formats.append(await measure_formats(options, file, target, report))


async def run_gpu(options: BenchOptions, results: BenchResults, report: Report) -> None:
    """Measure the engine on an accelerator, in a separate process; without one, the result is a note."""
    report("the engine on an accelerator, if there is one")
    checkout = options.peers.get("gpt-fast")
    peer = ("--gpt-fast", str(checkout)) if checkout else ()
    failure = "the engine on an accelerator cannot be measured"
    printed = await output(failure, sys.executable, "-m", "bench.gpu", "--models", str(options.models.resolve()), *peer)
    results.gpu += dict.fromkeys(line for line in printed.decode().splitlines() if line.startswith("gpu: "))


def profile_of(described: VerifierDescription, target: int, row: str, limit: Limit) -> StepProfile:
    """Return the profile of the verifier's latest steps, from its description."""
    times = described.step_times
    costs = sorted((cost.tokens, cost.microseconds / 1e3) for cost in described.step_costs)
    tokens, taken = [cost[0] for cost in costs], [cost[1] for cost in costs]
    predicted = float(np.interp(times.rows, tokens, taken, right=math.nan)) if costs else math.nan
    return StepProfile(
        target,
        row,
        times.rows,
        times.forward_us / 1e3,
        times.waited_us / 1e3,
        times.overhead_us / 1e3,
        predicted,
        limit.floor_s(described.weight_bytes, times.rows, described.dtype) * 1e3,
        limit.read_s(described.weight_bytes) * 1e3,
    )


@asynccontextmanager
async def open_rows(options: BenchOptions, target: Path, title: str, report: Report) -> AsyncIterator[list[BenchRow]]:
    """Start all rows, one after the other."""
    config = options.cluster(target)
    models = Models(target, options.models / "drafter", options.dtype, options.threads)
    async with AsyncExitStack() as stack:
        rows: list[BenchRow] = []
        for name in WORKERS:
            report(f"{title}: starting {name}")
            rows.append(await stack.enter_async_context(worker_row(name, models, config)))
        if options.llama_cpp:
            report(f"{title}: starting llama.cpp")
            rows += rows_of_worker(await stack.enter_async_context(llama_worker(models)))
        for name, folder in options.peers.items():
            report(f"{title}: starting {name}")
            peer = (
                worker_row(name, models, config, "--checkout", str(folder))
                if name == "gpt-fast"
                else llama_server_row(name, folder, models)
            )
            rows.append(await stack.enter_async_context(peer))
        report(f"{title}: starting the cluster")
        cluster = await stack.enter_async_context(running(config))
        rows += [ClusterRow("plain", cluster, "off"), ClusterRow("distributed", cluster, None)]
        # Each in a separate cluster, because a verifier chooses one overlap mode for all of its sessions.
        for rule in options.rules:
            report(f"{title}: starting {rule}")
            rows.append(ClusterRow(rule, await stack.enter_async_context(running(config)), None, rule))
        for drafts in options.drafts:
            report(f"{title}: starting {drafts}")
            lookup = options.cluster(target, drafts=drafts)
            rows.append(ClusterRow(drafts, await stack.enter_async_context(running(lookup)), None))
        yield rows


async def _profile(options: BenchOptions, row: ClusterRow, prompts: Prompts, target: int, limit: Limit) -> StepProfile:
    """Run a row alone until the verifier's medians contain only this row's steps, and return them."""
    before = (await row.cluster.describe()).steps
    number = 0
    while (described := await row.cluster.describe()).steps - before < options.profiled_steps:
        _, tokens = prompts[number % len(prompts)]
        temperature = options.temperatures[number % len(options.temperatures)]
        await row.generate(BenchRequest(tokens, temperature, SEED + number, 2 * options.max_tokens))
        number += 1
    return profile_of(described, target, row.name, limit)


async def _memory(target: int, rows: Sequence[BenchRow]) -> list[RowMemory]:
    """Return the memory of all processes; a process that rows share is listed once."""
    found: dict[int, RowMemory] = {}
    for row in rows:
        fixed: dict[str, float] = {}
        if isinstance(row, ClusterRow):
            described = await row.cluster.describe()
            fixed["verifier-0"] = (described.weight_bytes + described.kv_bytes) / 1e6
        for process, pid in row.pids().items():
            name = "cluster" if row.name in SHARED else row.name
            entry = RowMemory(target, name, process, peak_mb(pid), resident_mb(pid), fixed.get(process, 0.0))
            found.setdefault(pid, entry)
    return list(found.values())


def _encoded(options: BenchOptions, prompts: Sequence[tuple[str, str]]) -> Prompts:
    """Return the prompts' token ids, so that every row gets exactly the same input."""
    tokenizer = Tokenizer.from_file(str(options.models / "target" / "tokenizer.json"))
    return [(name, tuple(tokenizer.encode(text).ids)) for name, text in prompts]
