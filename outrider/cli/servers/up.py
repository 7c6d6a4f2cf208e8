"""`outrider up`: starts a complete cluster, on this machine or on Ray."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.rpc.lifecycle import run_until_signal

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.fleet.cluster import Cluster


def up(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CLUSTER.toml]",
            help="See examples/cluster.toml. [default: SmolLM2 135M, which is fetched, and the drafter in models/]",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run the servers on the nodes of a Ray cluster: HOST:PORT, or auto."),
    ] = None,
) -> None:
    """Start a complete cluster: Redis, verifiers, drafters, router. Ctrl-C stops it.

    Servers that end are started again. If drafters are added to or removed from the file while the cluster runs, the
    command starts or stops them.
    """
    run_until_signal(_serve(file, ray))


async def _serve(file: Path | None, ray: str | None) -> None:
    from rich.console import Console

    from outrider.config import load_cluster
    from outrider.fleet.cluster import LocalCluster
    from outrider.fleet.example_cluster import MODELS, example_cluster, example_pair
    from outrider.fleet.process import ClusterServer
    from outrider.fleet.supervisor import ClusterSupervisor

    screen, log = Console(), Console(stderr=True)
    chats = False
    if file is None:
        with log.status("fetching SmolLM2 135M (98 MB) ..."):
            pair = await asyncio.to_thread(example_pair, MODELS, partial(log.print, style="yellow", soft_wrap=True))
        config, chats = example_cluster(pair), pair.chats
    else:
        config = load_cluster(file)

    def forward(name: str, line: str) -> None:
        log.out(f"{name}: {line}", highlight=False)

    def ready(server: ClusterServer) -> None:
        log.print(f"{server.name} is ready on {server.address}", highlight=False)

    cluster: Cluster[Any]
    if ray is None:
        cluster = LocalCluster(config, forward=forward, ready=ready)
    else:
        from outrider.fleet.ray_cluster import RayCluster

        cluster = RayCluster(config, ray, forward=forward, ready=ready)
    try:
        with log.status(f"starting {', '.join(cluster.processes)} ..."):
            await cluster.__aenter__()
        screen.print(_table(cluster))
        for line in await cluster.misfits():
            log.print(f"warning: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        first, prompt = ("chat", "") if chats else ("generate", ' "def add(a, b):"')
        screen.print(
            f"Try: outrider {first} --address {cluster.router_address}{prompt}   Ctrl-C stops the cluster.",
            highlight=False,
            soft_wrap=True,
        )
        if config.router.metrics and not config.router.metrics.endswith(":0"):
            page = config.router.metrics
            screen.print(f"Watch: http://{page}/ or outrider top {page}", highlight=False, soft_wrap=True)
        await ClusterSupervisor(
            cluster, file, config, lambda event: log.print(event, style="bold red", markup=False, highlight=False)
        ).run()
    finally:
        with log.status("stopping ..."):
            await cluster.__aexit__(None, None, None)


def _table(cluster: Cluster[Any]) -> Table:
    from rich.table import Table

    table = Table("server", "listens on", "runs as")
    for process in cluster.processes.values():
        table.add_row(process.name, process.address, process.where)
    return table
