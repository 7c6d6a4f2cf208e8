"""What a cluster may hold once its sessions have ended: no task, stream, KV slot, key or descriptor of any of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from outrider.rpc.channels import open_channel
from outrider.store.redis.client import connect
from outrider.v1 import drafter_pb2, types_pb2
from outrider.v1.drafter_pb2_grpc import DrafterStub
from tests.e2e.mini_router import described

EXPIRED = -2  # what Redis returns for a key that is not there
SLACK = 12  # pools keep what was ever needed at once; a leak in one way of seven is 21 in the smallest run


def forgetful(model: Path, name: str, slots: int) -> ClusterConfig:
    """A cluster that soon forgets sessions. A model is its target and drafts for itself."""
    return ClusterConfig(
        router=RouterConfig(
            listen="127.0.0.1:0", models={name: model}, max_sessions=64, session_ttl_s=2, resume_ttl_s=1, lease_s=1
        ),
        verifier=[VerifierConfig(model=model, name=name, dtype="float32", slots=slots)],
        drafter=[DrafterConfig(model=model, dtype="float32", slots=slots)],
    )


@asynccontextmanager
async def nothing_left(cluster: LocalCluster, warm_up: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """On leaving, asserts that the cluster and this process hold nothing of the sessions that the body had.

    What `warm_up` leaves is left by the first sessions alone: pools, connections.
    """
    verifier = cluster.processes["verifier-0"].address
    async with open_channel(cluster.processes["drafter-0"].address) as to_drafter:
        drafter = DrafterStub(to_drafter)
        await warm_up()
        before = await figures(cluster, drafter)
        yield
        async with asyncio.timeout(15):
            while (await described(verifier)).sessions or (
                await drafter.Describe(types_pb2.DescribeRequest())
            ).sessions:
                await asyncio.sleep(0.05)
        steps = (await described(verifier)).steps
        await asyncio.sleep(4)  # time to live, leases, and what waits for either
        assert (await described(verifier)).steps == steps
        after = await figures(cluster, drafter)
        for name, value in after.items():
            assert value <= before[name] + SLACK, (name, before, after)
        async with connect(cluster.redis_url) as redis:
            for key in await redis.keys("*"):
                if any(tag in key for tag in (b"{workers}", b"{tickets}", b"{acceptance}", b"{leases}")):
                    continue
                # Of closed sessions a tombstone stays for a minute.
                assert key.endswith(b":session"), key
                closed, left_ms = await redis.hget(key, "closed"), await redis.pttl(key)
                assert left_ms == EXPIRED or (closed and 0 <= left_ms <= 60_000), (key, closed, left_ms)


async def figures(cluster: LocalCluster, drafter: DrafterStub) -> dict[str, int]:
    """What must not grow with the number of sessions that were served."""
    verifier = await described(cluster.processes["verifier-0"].address)
    drafting: drafter_pb2.DrafterDescription = await drafter.Describe(types_pb2.DescribeRequest())
    counts = {"verifier tasks": verifier.tasks, "drafter tasks": drafting.tasks, "streams": verifier.drafters}
    counts |= {"tasks": len(asyncio.all_tasks()), "descriptors": len(os.listdir("/proc/self/fd"))}  # of this process
    for name, process in cluster.processes.items():
        counts[f"{name} descriptors"] = len(os.listdir(f"/proc/{process.pid}/fd"))
        counts[f"{name} threads"] = len(os.listdir(f"/proc/{process.pid}/task"))
    return counts


def resident(cluster: LocalCluster) -> dict[str, float]:
    """The memory of each process, in megabytes."""
    pages = os.sysconf("SC_PAGE_SIZE") / 1e6
    return {
        name: int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * pages
        for name, process in cluster.processes.items()
    }
