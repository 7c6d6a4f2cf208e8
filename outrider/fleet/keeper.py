"""Keeps a cluster as its file says while it runs: starts again what ends, and follows changes of its drafters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.config import ClusterConfig, load_cluster
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.fleet.cluster import Cluster
from outrider.fleet.process import Server

PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)  # before a server is started again, time after time
STEADY_S = 60.0  # one that ran so long is started again as if it were the first time
LOOK_S = 0.5  # between two looks at the file


class Keeper:
    """Watches a cluster that has been entered. `report` hears what happens, in sentences."""

    def __init__(self, cluster: Cluster[Any], file: Path, config: ClusterConfig, report: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._file = file
        self._config = config
        self._report = report

    async def run(self) -> None:
        """Until cancelled. Raises Unavailable when the router has ended: nobody can reach the rest without it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for server in self._cluster.processes.values():
                    tasks.create_task(self._keep(server))
                tasks.create_task(self._follow(tasks))
        except* OutriderError as errors:
            raise errors.exceptions[0] from None

    async def _keep(self, server: Server) -> None:
        failures = 0
        while True:
            began = asyncio.get_running_loop().time()
            status = await server.wait()
            if server.name not in self._cluster.processes:  # it was stopped because it is not wanted any more
                return
            self._report(f"{server.name} ({server.where}) ended with status {status}")
            if server.role == "router":
                raise Unavailable("the router has ended, so the cluster is stopped; its last words are above")
            if asyncio.get_running_loop().time() - began > STEADY_S:
                failures = 0
            failures = await self._start_again(server, failures)

    async def _start_again(self, server: Server, failures: int) -> int:
        """Until it runs or is not wanted any more; how often that has been tried by now."""
        while server.name in self._cluster.processes:
            await asyncio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
            failures += 1
            try:
                await server.start(self._cluster.redis_url)
            except OutriderError as error:
                self._report(str(error))
            else:
                self._report(f"{server.name} runs again, on {server.address}")
                break
        return failures

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Applies changes of the file."""
        seen = None  # it may have changed since it was read
        while True:
            now = _changed(self._file)
            if now is None or now == seen:
                await asyncio.sleep(LOOK_S)
                continue
            seen = now
            known = set(self._cluster.processes)
            try:
                await self._apply(load_cluster(self._file))
            except OutriderError as error:
                self._report(f"{self._file} has changed, and not all of that was done: {error}")
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


def _changed(file: Path) -> int | None:
    """When it was last written; None while it is not there."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None
