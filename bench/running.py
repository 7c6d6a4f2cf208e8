"""The suites: who is asked what, in which order."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.asking import Ask
from bench.cluster import ClusterRow, running
from bench.faults import FaultProxy
from bench.figures import Loaded, Memory, Profile, Results, Take
from bench.limit import Limit, measure
from bench.llama_cpp import llama_worker, rows_of_worker
from bench.options import SEED, Options, padded
from bench.passes import measure_passes
from bench.peers import llama_server_row
from bench.processes import output, peak_mb, resident_mb
from bench.rows import WORKERS, Models, Row, worker_row
from bench.tiers import run_tiers as measure_tiers
from outrider.cli.load import Load, carry
from outrider.cli.samples import acceptance_length, percentile
from outrider.v1.verifier_pb2 import VerifierDescription

WARM_UP_TOKENS = 24
LEARNING = ("in-process", "distributed")  # rows that find out how drafters had better work
SHARED = ("plain", "distributed")  # rows of one cluster
LEARNING_TOKENS = 512  # what that takes them
SPARE_SLOTS = 4  # for sessions of the window before that have yet to end
ANSWER_TOKENS = 48  # load suite
SALTS = 1000  # token ids that a prompt may be begun with, so that no KV of an earlier one fits

Prompts = Sequence[tuple[str, tuple[int, ...]]]
Say = Callable[[str], None]  # what is being done now


async def run_rows(options: Options, results: Results, say: Say) -> None:
    """Every row, one session at a time, interleaved: whatever the machine does meanwhile hits all alike."""
    *prompts, familiar = _encoded(options, options.fresh)
    learning = dict.fromkeys(LEARNING, LEARNING_TOKENS)
    learning |= dict.fromkeys((*options.rules, *options.drafts), options.learning_tokens)
    for target in options.targets:
        name = f"rows, {target / 1e6:.0f}M"
        say(f"{name}: padding the target")
        async with padded(options, target) as folder, _rows(options, folder, name, say) as rows:
            say(f"{name}: measuring the machine's limit")
            limit = await measure(options.threads)
            for row in rows:
                say(f"{name}: warming {row.name} up")
                warm_up = learning.get(row.name, WARM_UP_TOKENS)
                for temperature in options.temperatures:
                    await row.generate(Ask(familiar[1], temperature, SEED - 1, warm_up))
            async for take in _interleaved(options, rows, prompts, target, say):
                results.takes.append(take)
            say(f"{name}: first tokens")
            results.firsts += await _first_tokens(rows, prompts[: len(options.short)], target)
            say(f"{name}: measuring the machine's limit again")
            limit = results.limits[target] = limit.better(await measure(options.threads))
            for row in rows:
                if isinstance(row, ClusterRow) and row.name in SHARED:
                    say(f"{name}: where {row.name} spends its steps")
                    results.profiles.append(await _profile(options, row, prompts, target, limit))
            results.memory += await _memory(target, rows)


async def _interleaved(
    options: Options, rows: Sequence[Row], prompts: Prompts, target: int, say: Say
) -> AsyncIterator[Take]:
    """For every repetition, its prompts and every temperature each row once, in an order that rotates.

    No prompt comes again, if there are enough: drafters that keep what was said would know the answer.
    """
    order, each = list(rows), len(prompts) // options.repetitions
    for repetition in range(options.repetitions):
        for number in range(repetition * each, (repetition + 1) * each):
            prompt, tokens = prompts[number]
            for temperature in options.temperatures:
                ask = Ask(tokens, temperature, SEED + number, options.max_tokens)
                for row in order:
                    turn = (
                        f"repetition {repetition + 1} of {options.repetitions}, {prompt}, temperature {temperature:g}"
                    )
                    say(f"{turn}: {row.name}")
                    yield Take(target, row.name, prompt, repetition, temperature, await row.generate(ask))
                order = order[1:] + order[:1]


async def _first_tokens(rows: Sequence[Row], prompts: Prompts, target: int) -> list[Take]:
    """One token after each prompt, begun so that no row has KV of it."""
    dice = random.Random(SEED)
    takes = []
    for number, (prompt, tokens) in enumerate(prompts):
        for row in rows:
            ask = Ask((dice.randrange(SALTS), *tokens), 0.0, SEED + number, 1)
            takes.append(Take(target, row.name, prompt, 0, 0.0, await row.generate(ask)))
    return takes


async def run_load(options: Options, results: Results, say: Say) -> None:
    """Plain and distributed in turn under the same loads: short and long prompts, both temperatures mixed."""
    prompts = [tokens for _, tokens in _encoded(options, (*options.short, *options.long))]
    target = options.targets[0]
    say("load: padding the target")
    async with padded(options, target) as folder:
        limit = results.limits.get(target) or await measure(options.threads)
        config = options.cluster(folder, slots=max(options.callers) + SPARE_SLOTS)
        async with running(config) as cluster:
            order = [ClusterRow("plain", cluster, "off"), ClusterRow("distributed", cluster, None)]
            for row in order:
                await row.generate(Ask(prompts[0], 0.0, SEED, WARM_UP_TOKENS))
            for callers in options.callers:
                for repetition in range(options.repetitions):
                    load = Load(
                        prompts,
                        callers,
                        options.load_s,
                        options.ramp_s,
                        ANSWER_TOKENS,
                        options.temperatures,
                        seed=SEED + repetition,
                        salts=SALTS,
                    )
                    for row in order:
                        say(
                            f"load: {callers} callers, repetition {repetition + 1} of {options.repetitions}: "
                            f"{row.name} ({load.ramp_s + load.seconds:.0f} s)"
                        )
                        carried = await carry(cluster.client, load, speculation=row.speculation)
                        gaps = [gap for sample in carried.samples for gap in sample.gaps]
                        results.loads.append(
                            Loaded(
                                target,
                                row.name,
                                callers,
                                repetition,
                                carried.goodput,
                                len(carried.samples),
                                acceptance_length(carried.samples),
                                percentile((sample.first_token_s for sample in carried.samples), 50),
                                percentile(gaps, 50),
                                percentile(gaps, 99),
                                profile_of(await cluster.describe(), target, row.name, limit),
                            )
                        )
                    order.reverse()


async def run_distance(options: Options, results: Results, say: Say) -> None:
    """The drafter moves away: a proxy between it and the verifier, and nothing else, delays what they say."""
    prompts = _encoded(options, options.short)
    for target in options.targets:
        name = f"distance, {target / 1e6:.0f}M"
        say(f"{name}: padding the target")
        async with padded(options, target) as folder, FaultProxy("") as proxy:
            say(f"{name}: starting the cluster")
            async with running(options.cluster(folder, via=proxy.address)) as cluster:
                proxy.target = cluster.verifier_address  # nobody has connected yet
                distributed = ClusterRow("distributed", cluster, None)
                rows = [ClusterRow("plain", cluster, "off"), distributed]
                trips = list(options.round_trips_ms)
                for repetition in range(options.repetitions):
                    for trip in trips:
                        proxy.delay_s = trip / 2000
                        proxy.cut()  # a drafter that connects anew may be anywhere: what was learned is forgotten
                        for temperature in options.temperatures:
                            await distributed.generate(Ask(prompts[0][1], temperature, SEED, LEARNING_TOKENS))
                        for number, (prompt, tokens) in enumerate(prompts):
                            for temperature in options.temperatures:
                                ask = Ask(tokens, temperature, SEED + number, options.max_tokens)
                                for row in rows:
                                    say(
                                        f"{name}: repetition {repetition + 1} of {options.repetitions}, round trip "
                                        f"{trip:g} ms, {prompt}, temperature {temperature:g}: {row.name}"
                                    )
                                    sample = await row.generate(ask)
                                    results.far.append(
                                        Take(target, row.name, prompt, repetition, temperature, sample, trip)
                                    )
                                rows.reverse()
                    trips = trips[1:] + trips[:1]


async def run_tiers(options: Options, results: Results, say: Say) -> None:
    """Tiers of drafters against fewer of them."""
    await measure_tiers(options, results, _encoded(options, options.short), say)


async def run_passes(options: Options, results: Results, say: Say) -> None:
    """Passes of our engine and of llama.cpp, by their rows."""
    for target in options.targets:
        results.passes += await measure_passes(options, target, say)


async def run_gpu(options: Options, results: Results, say: Say) -> None:
    """The engine on an accelerator, in a process of its own; where there is none, it says so."""
    say("the engine on an accelerator, if there is one")
    checkout = options.peers.get("gpt-fast")
    peer = ("--gpt-fast", str(checkout)) if checkout else ()
    failure = "the engine on an accelerator cannot be measured"
    said = await output(failure, sys.executable, "-m", "bench.gpu", "--models", str(options.models.resolve()), *peer)
    results.gpu += dict.fromkeys(line for line in said.decode().splitlines() if line.startswith("gpu: "))


def profile_of(described: VerifierDescription, target: int, row: str, limit: Limit) -> Profile:
    """The verifier's own figures of its latest steps."""
    times = described.step_times
    costs = sorted((cost.tokens, cost.microseconds / 1e3) for cost in described.step_costs)
    tokens, taken = [cost[0] for cost in costs], [cost[1] for cost in costs]
    predicted = float(np.interp(times.rows, tokens, taken, right=math.nan)) if costs else math.nan
    return Profile(
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
async def _rows(options: Options, target: Path, title: str, say: Say) -> AsyncIterator[list[Row]]:
    """All rows, started one after the other."""
    config = options.cluster(target)
    models = Models(target, options.models / "drafter", options.dtype, options.threads)
    async with AsyncExitStack() as stack:
        rows: list[Row] = []
        for name in WORKERS:
            say(f"{title}: starting {name}")
            rows.append(await stack.enter_async_context(worker_row(name, models, config)))
        if options.llama_cpp:
            say(f"{title}: starting llama.cpp")
            rows += rows_of_worker(await stack.enter_async_context(llama_worker(models)))
        for name, folder in options.peers.items():
            say(f"{title}: starting {name}")
            peer = (
                worker_row(name, models, config, "--checkout", str(folder))
                if name == "gpt-fast"
                else llama_server_row(name, folder, models)
            )
            rows.append(await stack.enter_async_context(peer))
        say(f"{title}: starting the cluster")
        cluster = await stack.enter_async_context(running(config))
        rows += [ClusterRow("plain", cluster, "off"), ClusterRow("distributed", cluster, None)]
        # Each in a cluster of its own: how drafters had better work is found out for all that a verifier serves.
        for rule in options.rules:
            say(f"{title}: starting {rule}")
            rows.append(ClusterRow(rule, await stack.enter_async_context(running(config)), None, rule))
        for drafts in options.drafts:
            say(f"{title}: starting {drafts}")
            lookup = options.cluster(target, drafts=drafts)
            rows.append(ClusterRow(drafts, await stack.enter_async_context(running(lookup)), None))
        yield rows


async def _profile(options: Options, row: ClusterRow, prompts: Prompts, target: int, limit: Limit) -> Profile:
    """Has a row alone take so many steps that the verifier's medians are this row's, and asks for them."""
    before = (await row.cluster.describe()).steps
    number = 0
    while (described := await row.cluster.describe()).steps - before < options.profiled_steps:
        _, tokens = prompts[number % len(prompts)]
        temperature = options.temperatures[number % len(options.temperatures)]
        await row.generate(Ask(tokens, temperature, SEED + number, 2 * options.max_tokens))
        number += 1
    return profile_of(described, target, row.name, limit)


async def _memory(target: int, rows: Sequence[Row]) -> list[Memory]:
    """Of all processes; those that rows share are named once."""
    found: dict[int, Memory] = {}
    for row in rows:
        fixed: dict[str, float] = {}
        if isinstance(row, ClusterRow):
            described = await row.cluster.describe()
            fixed["verifier-0"] = (described.weight_bytes + described.kv_bytes) / 1e6
        for process, pid in row.pids().items():
            name = "cluster" if row.name in SHARED else row.name
            entry = Memory(target, name, process, peak_mb(pid), resident_mb(pid), fixed.get(process, 0.0))
            found.setdefault(pid, entry)
    return list(found.values())


def _encoded(options: Options, prompts: Sequence[tuple[str, str]]) -> Prompts:
    """Token ids, so that every row is asked the very same."""
    tokenizer = Tokenizer.from_file(str(options.models / "target" / "tokenizer.json"))
    return [(name, tuple(tokenizer.encode(text).ids)) for name, text in prompts]
