"""A cluster on this machine.

async with LocalCluster(config) as cluster:
    client = outrider.AsyncClient(cluster.router_address)
"""

from __future__ import annotations

from contextlib import AsyncExitStack

from outrider.config import Section
from outrider.fleet.cluster import Cluster
from outrider.fleet.process import Process, Role
from outrider.store.embedded import EmbeddedRedis


class LocalCluster(Cluster[Process]):
    """A cluster whose servers are child processes. They end with this process, even when it is killed (Linux)."""

    def _server(self, role: Role, name: str, section: Section) -> Process:
        return Process(role, name, section, self._forward)

    def _own_redis(self, stack: AsyncExitStack) -> str:
        return stack.enter_context(EmbeddedRedis(self._config.redis.data)).url
