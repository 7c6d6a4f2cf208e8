"""The rows of a cluster, plain and distributed: a client's requests to a router."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from bench.rows.engine_time import EngineTime, read_metric, read_page
from bench.rows.pinning import CoreSplit, PinnedCluster, pin
from bench.rows.requests import BenchRequest
from outrider.cli.performance.load import Speculation
from outrider.cli.performance.samples import Sample, timed
from outrider.client import AsyncClient
from outrider.config import ClusterConfig, DrafterConfig, RedisConfig
from outrider.core.session.contract import SHARED_NOISE, RuleName
from outrider.fleet.cluster import LocalCluster
from outrider.rpc.channels import open_channel
from outrider.store.redis.embedded import EmbeddedRedis
from outrider.v1 import types_pb2
from outrider.v1.verifier_pb2 import VerifierDescription
from outrider.v1.verifier_pb2_grpc import VerifierStub

_PAGE = re.compile(r": metrics at http://(\S+)/metrics$")


class BenchCluster:
    """A running cluster and a client of its router."""

    def __init__(
        self, local: LocalCluster, redis: EmbeddedRedis, client: AsyncClient, pages: Mapping[str, str]
    ) -> None:
        """`pages`: addresses of the metrics pages, by the servers' names."""
        self.client = client
        self.redis = redis
        self._pages = pages
        self._local = local

    @property
    def verifier_address(self) -> str:
        """ "host:port"."""
        return self._local.processes["verifier-0"].address

    @property
    def router_address(self) -> str:
        """ "host:port"."""
        return self._local.router_address

    async def scale(self, drafters: Sequence[DrafterConfig]) -> None:
        """Change the drafters. Raises as `LocalCluster.scale`."""
        await self._local.scale(drafters)

    def pids(self) -> dict[str, int]:
        """Return the process ids of router, verifier, drafter and Redis, by name."""
        return {process.name: process.pid for process in self._local.processes.values()} | {"redis": self.redis.pid}

    async def start(self, name: str) -> None:
        """Start a server again that has ended. Raises the errors of LocalCluster."""
        process = self._local.processes[name]
        await process.wait()
        await process.start(self.redis.url)

    async def restart(self, name: str) -> float:
        """Kill a server and start it again; return the seconds until it is ready. Raises the errors of LocalCluster."""
        process = self._local.processes[name]
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        began = time.monotonic()
        await process.start(self.redis.url)
        return time.monotonic() - began

    async def describe(self) -> VerifierDescription:
        """Return the verifier's description."""
        async with open_channel(self.verifier_address) as channel:
            described: VerifierDescription = await VerifierStub(channel).Describe(types_pb2.DescribeRequest())
            return described

    async def control(self, name: str) -> Any:
        """Return what a server's controllers estimate. It needs a metrics page."""
        return json.loads(await asyncio.to_thread(read_page, self._pages[name], "control"))

    async def metric(self, name: str, metric: str) -> float:
        """Return a metric of a server, which needs a metrics page."""
        return await asyncio.to_thread(read_metric, self._pages[name], metric)

    async def engine_time(self) -> EngineTime:
        """Return how long verifier and drafter have computed. Both need a metrics page."""
        return await EngineTime.read(self._pages)


@asynccontextmanager
async def running(
    config: ClusterConfig, split: CoreSplit | None = None, redis: EmbeddedRedis | None = None
) -> AsyncIterator[BenchCluster]:
    """Start a cluster, its processes pinned to the cores of `split`, at the Redis of another cluster or at a new one.
    Raises the errors of LocalCluster."""
    pages: dict[str, str] = {}

    def note_page(name: str, line: str) -> None:
        if found := _PAGE.search(line):
            pages[name] = found[1]

    with EmbeddedRedis() if redis is None else nullcontext(redis) as redis:
        config = config.model_copy(update={"redis": RedisConfig(url=redis.url)})
        if split is None:
            cluster = LocalCluster(config, forward=note_page)
        else:
            pin(redis.pid, split.others)
            cluster = PinnedCluster(config, split, note_page)
        ca = None if config.tls is None else config.tls.ca
        async with cluster as local, AsyncClient(local.router_address, tls=ca is not None, ca=ca) as client:
            yield BenchCluster(local, redis, client, pages)


class ClusterRow:
    """A row of a running cluster under a rule, with speculation (None: the router's default) or without ("off")."""

    def __init__(
        self, name: str, cluster: BenchCluster, speculation: Speculation, rule: RuleName = SHARED_NOISE
    ) -> None:
        self.name = name
        self.cluster = cluster
        self.speculation: Speculation = speculation
        self._rule: RuleName = rule

    async def generate(self, request: BenchRequest) -> Sample:
        """Generate an answer, timed by a client of the router."""
        return await timed(
            self.cluster.client,
            request.prompt,
            temperature=request.temperature,
            seed=request.seed,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            speculation=self.speculation,
            rule=self._rule,
        )

    def pids(self) -> Mapping[str, int]:
        """Return the cluster's processes, which all of its rows share."""
        return self.cluster.pids()
