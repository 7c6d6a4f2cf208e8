"""A drafter that is far from its verifier: a proxy is the link between them, and the verifier has a core of its own.

So drafting while a pass runs takes no core from the pass, as on two machines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.faults import FaultProxy
from bench.links import Link
from bench.options import SEED, BenchOptions, padded
from bench.report.figures import BenchResults, Measurement
from bench.rows.cluster import ClusterRow, running
from bench.rows.engine_time import PAGE
from bench.rows.pinning import CoreSplit, pinned, split_cores
from bench.rows.requests import BenchRequest
from outrider.config import TlsConfig
from outrider.rpc.certificates import make as make_certificates

PLAIN = "plain"
LEARNING_TOKENS = 768  # of each generation before a row is measured
LEARNING_ROUNDS = 2  # generations at each temperature
# Keys of [router], by row. The first are by outrider.core.session.contract.PlanOverlap: when drafters draft, beside the
# verifier's passes.
OVERLAPS: dict[str, dict[str, Any]] = {
    "measured": {},
    "always": {"overlap": True},
    "never": {"overlap": False},
    "rounds": {"policy": "rounds", "depth": 4},
    "relayed": {},
    "relayed rounds": {"policy": "rounds", "depth": 4},
    "larger": {},
    "both": {"drafters_per_session": 2},
}
RELAYED = "relayed"  # beginning of the rows whose drafter dials the router, and sends its drafts through it
LARGER, BOTH = "larger", "both"  # a larger drafter behind the link, alone or with the usual one that is near

Prompts = Sequence[tuple[str, tuple[int, ...]]]


async def run_distance(options: BenchOptions, results: BenchResults, prompts: Prompts, report: Any) -> None:
    """Measure every row over every link once in each repetition; the order of links and rows rotates."""
    split = split_cores()
    for target in options.targets:
        title = f"distance, {target / 1e6:.0f}M"
        report(f"{title}: padding the target")
        async with padded(options, target) as folder:
            for repetition, link in _rotated(options):
                turn = f"{title}: repetition {repetition + 1} of {options.repetitions}, {link.name}"
                report(f"{turn}: starting the clusters")
                results.far += await _measure(options, folder, split, link, target, repetition, prompts, turn, report)


async def _measure(
    options: BenchOptions,
    folder: Path,
    split: CoreSplit,
    link: Link,
    target: int,
    repetition: int,
    prompts: Prompts,
    turn: str,
    report: Any,
) -> list[Measurement]:
    """Measure the rows in clusters that know this link alone."""
    takes = []
    async with AsyncExitStack() as stack:
        clusters = [
            await stack.enter_async_context(_distant(options_of(options, overlap), folder, overlap, split, link))
            for overlap in options.overlaps
        ]
        rows = [ClusterRow(PLAIN, clusters[0].cluster, "off"), *clusters]
        stack.enter_context(pinned(split.others))
        for row in clusters:
            report(f"{turn}: {row.name} learns")
            for temperature in options.temperatures * LEARNING_ROUNDS:
                await row.generate(BenchRequest(prompts[0][1], temperature, SEED, LEARNING_TOKENS))
        for (number, (prompt, tokens)), temperature in product(enumerate(prompts), options.temperatures):
            request = BenchRequest(tokens, temperature, SEED + number, options.max_tokens)
            for row in rows:
                report(f"{turn}, {prompt}, temperature {temperature:g}: {row.name}")
                before = await row.cluster.engine_time()
                sample = await row.generate(request)
                idle = (await row.cluster.engine_time()).idle_since(before)
                takes.append(Measurement(target, row.name, prompt, repetition, temperature, sample, link.name, idle))
            rows = rows[1:] + rows[:1]
    return takes


def options_of(options: BenchOptions, overlap: str) -> BenchOptions:
    """Return the options of a row's cluster: how drafters overlap, one thread for the verifier, and metrics pages."""
    return replace(
        options,
        router={**options.router, **OVERLAPS[overlap]},
        verifier={**options.verifier, "threads": 1, **PAGE},
        drafter={**options.drafter, **PAGE},
    )


@asynccontextmanager
async def _distant(
    options: BenchOptions, target: Path, name: str, split: CoreSplit, link: Link
) -> AsyncIterator[ClusterRow]:
    """Start a cluster with a proxy as the link between drafter and verifier, or router. Yield its row."""
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(FaultProxy("", seed=SEED))
        config = options.cluster(target, via=proxy.address)
        if name.startswith(RELAYED):
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="outrider-relay-")))
            make_certificates(folder, [])
            tls = TlsConfig(ca=folder / "ca.pem", cert=folder / "{role}.pem", key=folder / "{role}.key")
            alone = config.model_copy(update={"tls": tls, "drafter": []})
            cluster = await stack.enter_async_context(running(alone, split))
            proxy.target = cluster.router_address
            link.apply(proxy)
            # Without a certificate of its own it reaches no verifier, as a laptop does not.
            dialing = {"via": None, "connect": proxy.address, "ca": tls.ca}
            await cluster.scale([drafter.model_copy(update=dialing) for drafter in config.drafter])
        else:
            (drafter,) = config.drafter
            larger = drafter.model_copy(update={"model": options.models / "mid"})
            if name in (LARGER, BOTH):
                near = [drafter.model_copy(update={"via": None})] if name == BOTH else []
                config = config.model_copy(update={"drafter": [*near, larger]})
            cluster = await stack.enter_async_context(running(config, split))
            proxy.target = cluster.verifier_address  # set before the first connection
            link.apply(proxy)
        yield ClusterRow(name, cluster, None)


def _rotated(options: BenchOptions) -> Iterator[tuple[int, Link]]:
    """Yield each repetition and link; each repetition begins with another link."""
    for repetition in range(options.repetitions):
        first = repetition % len(options.links)
        for link in (*options.links[first:], *options.links[:first]):
            yield repetition, link
