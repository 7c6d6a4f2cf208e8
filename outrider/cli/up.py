"""`outrider up`: a whole cluster on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.rpc.lifecycle import run_until_signal

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.fleet.local import LocalCluster


def up(file: Annotated[Path, typer.Argument(metavar="CLUSTER.toml", help="See examples/cluster.toml.")]) -> None:
    """Start a whole cluster: Redis, verifiers, drafters, router. Ctrl-C stops it."""
    run_until_signal(_serve(file))


async def _serve(file: Path) -> None:
    from rich.console import Console

    from outrider.config import load_cluster
    from outrider.errors import Unavailable
    from outrider.fleet.local import LocalCluster

    screen, log = Console(), Console(stderr=True)
    cluster = LocalCluster(
        load_cluster(file),
        forward=lambda name, line: log.out(f"{name}: {line}", highlight=False),
        ready=lambda process: log.print(f"{process.name} is ready on {process.address}", highlight=False),
    )
    try:
        with log.status(f"starting {', '.join(cluster.processes)} ..."):
            await cluster.__aenter__()
        screen.print(_table(cluster))
        screen.print(
            f'Try: outrider generate --address {cluster.router_address} "def add(a, b):"   Ctrl-C stops the cluster.',
            highlight=False,
            soft_wrap=True,
        )
        while True:
            process = await cluster.next_end()
            log.print(f"{process.name} (pid {process.pid}) ended with status {process.status}", style="bold red")
            if process.role == "router":
                raise Unavailable("the router has ended, so the cluster is stopped; its last words are above")
    finally:
        with log.status("stopping ..."):
            await cluster.__aexit__(None, None, None)


def _table(cluster: LocalCluster) -> Table:
    from rich.table import Table

    table = Table("server", "listens on", "pid")
    for process in cluster.processes.values():
        table.add_row(process.name, process.address, str(process.pid))
    return table
