"""`python -m bench.tracing`: measures the cost of telemetry, with one cluster without it and others that export it.

All clusters run at once and take turns under the same load. The collector is a process of this machine, so its time is
included.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from subprocess import DEVNULL, PIPE, Popen
from typing import Annotated

import grpc
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from bench.rows.cluster import BenchCluster, running
from outrider.cli.command import reported
from outrider.cli.performance.load import Load, apply_load, read_prompts
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.rpc.lifecycle import run_until_signal

TELEMETRY = {  # environment variables of a cluster's servers, beside the collector's address; None: no telemetry
    "nothing": None,
    "metrics, and traces at the default sampling": {},
    "metrics, and all traces": {"OTEL_TRACES_SAMPLER": "always_on"},
}
ANSWER = 96  # tokens


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Duration of each turn.")] = 8.0,
    repetitions: Annotated[int, typer.Option(min=2)] = 9,
    callers: Annotated[int, typer.Option(min=1)] = 4,
    models: Annotated[Path, typer.Option(help="Folder that holds target/ and drafter/.")] = Path("models"),
    texts: Annotated[Path, typer.Option(help="JSON lines with an id and a prompt.")] = Path("examples/held_out.jsonl"),
) -> None:
    """Measure tokens a second with and without telemetry, and the ratios within each repetition."""
    with reported(), collector() as endpoint:
        prompts = [text for _, text in read_prompts(texts, "#short")]
        load = Load(prompts, callers, seconds, ramp_s=seconds / 4, max_tokens=ANSWER, think_s=0.01)
        run_until_signal(_measure(models, endpoint, load, repetitions))


async def _measure(models: Path, endpoint: str, load: Load, repetitions: int) -> None:
    speeds: dict[str, list[float]] = defaultdict(list)
    console = Console(stderr=True)
    async with AsyncExitStack() as stack:
        clusters: dict[str, BenchCluster] = {}
        for name, variables in TELEMETRY.items():
            with environment({} if variables is None else {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **variables}):
                clusters[name] = await stack.enter_async_context(running(_config(models, shown=variables is not None)))
        for repetition in range(repetitions):
            names = [*TELEMETRY]
            for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
                with console.status(f"{repetition + 1} of {repetitions}: {name}"):
                    speeds[name].append((await apply_load(clusters[name].client, load)).goodput)
    Console().print(_table(speeds))


def _config(models: Path, *, shown: bool) -> ClusterConfig:
    page = "127.0.0.1:0" if shown else None
    return ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": models / "target"}, metrics=page),
        verifier=[VerifierConfig(model=models / "target", dtype="float32", metrics=page)],
        drafter=[DrafterConfig(model=models / "drafter", dtype="float32", metrics=page)],
    )


def _table(speeds: dict[str, list[float]]) -> Table:
    base, *others = speeds
    table = Table("telemetry", "tokens/s", "ratio to none, median", "quartiles", box=SIMPLE)
    table.add_row(base, f"{median(speeds[base]):.0f}", "", "")
    for name in others:
        ratios = [with_telemetry / without for with_telemetry, without in zip(speeds[name], speeds[base], strict=True)]
        low, _, high = quantiles(ratios, n=4)
        table.add_row(name, f"{median(speeds[name]):.0f}", f"{median(ratios):.3f}", f"{low:.3f} to {high:.3f}")
    return table


@contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that start in the block."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def collector() -> Iterator[str]:
    """Run a process that accepts all OTLP exports and drops them. Yield its endpoint."""
    process = Popen([sys.executable, "-m", "bench.tracing", "--collect"], stdout=PIPE, stdin=PIPE, stderr=DEVNULL)
    assert process.stdout is not None
    try:
        yield f"http://{process.stdout.readline().decode().strip()}"
    finally:
        process.terminate()
        process.wait()


def _collect() -> None:
    """Run the collector. It answers each export with an empty message, which means that everything was accepted."""
    accept = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    server = grpc.server(ThreadPoolExecutor(2))
    for signal in ("trace.v1.Trace", "metrics.v1.Metrics"):
        service = f"opentelemetry.proto.collector.{signal}Service"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": accept}),))
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    if sys.argv[1:] == ["--collect"]:
        _collect()
    else:
        typer.run(main)
