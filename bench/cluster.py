"""The rows of a cluster: plain and distributed, through a router like any client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from bench.asking import Ask
from outrider.cli.load import Speculation
from outrider.cli.samples import Sample, timed
from outrider.client import AsyncClient
from outrider.config import ClusterConfig, RedisConfig
from outrider.core.contract import SHARED_NOISE, RuleName
from outrider.fleet.local import LocalCluster
from outrider.rpc.channels import open_channel
from outrider.store.embedded import EmbeddedRedis
from outrider.v1 import types_pb2
from outrider.v1.verifier_pb2 import VerifierDescription
from outrider.v1.verifier_pb2_grpc import VerifierStub


class Cluster:
    """A running cluster and a client of its router."""

    def __init__(self, local: LocalCluster, redis: EmbeddedRedis, client: AsyncClient) -> None:
        self.client = client
        self._local = local
        self._redis = redis

    @property
    def verifier_address(self) -> str:
        """ "host:port"."""
        return self._local.processes["verifier-0"].address

    @property
    def redis_url(self) -> str:
        """Of its Redis."""
        return self._redis.url

    def pids(self) -> dict[str, int]:
        """Router, verifier, drafter and Redis, by name."""
        return {process.name: process.pid for process in self._local.processes.values()} | {"redis": self._redis.pid}

    async def describe(self) -> VerifierDescription:
        """What the verifier says of itself."""
        async with open_channel(self.verifier_address) as channel:
            described: VerifierDescription = await VerifierStub(channel).Describe(types_pb2.DescribeRequest())
            return described


@asynccontextmanager
async def running(config: ClusterConfig) -> AsyncIterator[Cluster]:
    """Starts a cluster with a Redis of its own. Raises what LocalCluster raises."""
    with EmbeddedRedis() as redis:
        config = config.model_copy(update={"redis": RedisConfig(url=redis.url)})
        async with LocalCluster(config) as local, AsyncClient(local.router_address, tls=False) as client:
            yield Cluster(local, redis, client)


class ClusterRow:
    """A row of a running cluster, with speculation (None: as its router has it) or without ("off"), under a rule."""

    def __init__(self, name: str, cluster: Cluster, speculation: Speculation, rule: RuleName = SHARED_NOISE) -> None:
        self.name = name
        self.cluster = cluster
        self.speculation: Speculation = speculation
        self._rule: RuleName = rule

    async def generate(self, ask: Ask) -> Sample:
        """Answers, as a client of the router sees it."""
        return await timed(
            self.cluster.client,
            ask.prompt,
            temperature=ask.temperature,
            seed=ask.seed,
            max_tokens=ask.max_tokens,
            ignore_eos=True,
            speculation=self.speculation,
            rule=self._rule,
        )

    def pids(self) -> Mapping[str, int]:
        """The cluster's processes, which its rows share."""
        return self.cluster.pids()
