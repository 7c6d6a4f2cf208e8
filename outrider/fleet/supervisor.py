"""Supervises a running cluster: restarts servers that end, and applies changes of the drafters in its file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.config import ClusterConfig, load_cluster
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.fleet.cluster import Cluster
from outrider.fleet.process import ClusterServer, restart_backoff
from outrider.rpc.backoff import Backoff

POLL_S = 0.5  # between two checks of the file


class ClusterSupervisor:
    """Supervises a cluster that has been entered. `report` receives a sentence for each event; a cluster without a
    file does not change.
    """

    def __init__(
        self, cluster: Cluster[Any], file: Path | None, config: ClusterConfig, report: Callable[[str], None]
    ) -> None:
        self._cluster = cluster
        self._file = file
        self._config = config
        self._report = report

    async def run(self) -> None:
        """Run until cancelled. Raises Unavailable when the last router ends, because clients cannot do without it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for server in self._cluster.processes.values():
                    tasks.create_task(self._keep(server))
                if self._file is not None:
                    tasks.create_task(self._follow(tasks, self._file))
        except* OutriderError as errors:
            raise errors.exceptions[0] from None

    async def _keep(self, server: ClusterServer) -> None:
        backoff = restart_backoff()
        while True:
            began = asyncio.get_running_loop().time()
            status = await server.wait()
            if server.name not in self._cluster.processes:  # the server was removed from the file
                return
            self._report(f"{server.name} ({server.where}) ended with status {status}")
            if server.role == "router" and not self._has_router():
                raise Unavailable("the router has ended, so the cluster is stopped; its last output is above")
            backoff.ended_after(asyncio.get_running_loop().time() - began)
            await self._start_again(server, backoff)

    def _has_router(self) -> bool:
        return any(server.role == "router" and server.status is None for server in self._cluster.processes.values())

    async def _start_again(self, server: ClusterServer, backoff: Backoff) -> None:
        """Try to start a server until it runs or is removed from the cluster."""
        while server.name in self._cluster.processes:
            await backoff.wait()
            try:
                await server.start(self._cluster.redis_url_of(server.role))
            except OutriderError as error:
                self._report(str(error))
            else:
                self._report(f"{server.name} runs again, on {server.address}")
                return

    async def _follow(self, tasks: asyncio.TaskGroup, file: Path) -> None:
        """Apply changes of the file."""
        seen = None  # so that a change since the start is applied, too
        while True:
            now = _changed(file)
            if now is None or now == seen:
                await asyncio.sleep(POLL_S)
                continue
            seen = now
            known = set(self._cluster.processes)
            try:
                await self._apply(load_cluster(file))
            except OutriderError as error:
                self._report(f"{file} has changed, but not every change could be applied: {error}")
            for name in self._cluster.processes.keys() - known:
                tasks.create_task(self._keep(self._cluster.processes[name]))

    async def _apply(self, config: ClusterConfig) -> None:
        if config == self._config:
            return
        same = {"drafter": self._config.drafter, "tier": self._config.tier}
        if config.model_copy(update=same) != self._config:
            raise ConfigError("only drafters can change while a cluster runs; for the rest, stop it and start it again")
        before = len(self._config.drafters)
        await self._cluster.scale(config.drafters)
        self._config = config
        self._report(f"{self._file} has changed: {len(config.drafters)} drafters instead of {before}")
        for line in await self._cluster.misfits():
            self._report(line)


def _changed(file: Path) -> int | None:
    """Return the time of the file's last modification, in ns; None while the file does not exist."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None
