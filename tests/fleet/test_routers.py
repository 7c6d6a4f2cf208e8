"""Several routers on one address: each takes a share of the connections, and callers of a dead one go on elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest

import outrider
from outrider.config import ClusterConfig, RouterConfig, VerifierConfig
from outrider.errors import ConfigError, Unavailable
from outrider.fleet.cluster import LocalCluster
from outrider.fleet.ray_cluster import RayCluster
from outrider.fleet.supervisor import ClusterSupervisor
from outrider.store.redis.client import connect
from tests.fleet.conftest import TARGET

CALLERS = 16
VERIFIER = VerifierConfig(listen="127.0.0.1:0", model=TARGET, dtype="float32", slots=CALLERS)


def config(count: int, **router: object) -> ClusterConfig:
    section = RouterConfig(listen="127.0.0.1:0", models={"target": TARGET}, count=count, **router)  # type: ignore[arg-type]
    return ClusterConfig(router=section, verifier=[VERIFIER])


async def test_routers_share_an_address_and_callers_of_a_dead_one_continue_at_the_other() -> None:
    async with LocalCluster(config(2)) as cluster, AsyncExitStack() as stack:
        assert {name for name, one in cluster.processes.items() if one.role == "router"} == {"router", "router-1"}
        assert cluster.processes["router-1"].address == cluster.router_address
        clients = [
            await stack.enter_async_context(outrider.AsyncClient(cluster.router_address)) for _ in range(CALLERS)
        ]
        streams = [client.stream("def add(a, b):", max_tokens=200, seed=7) for client in clients]
        readers = [aiter(stream) for stream in streams]
        await asyncio.gather(*map(anext, readers))
        sessions = [stream.session_id for stream in streams]
        async with aclosing(connect(cluster.redis_url)) as redis:
            owners = [(await redis.hget(f"outrider:{{{one}}}:session", "owner")).decode() for one in sessions]
        assert len({owner.partition("/")[0] for owner in owners}) == 2
        os.kill(cluster.processes["router-1"].pid, signal.SIGKILL)
        for reader in readers:
            async for _ in reader:
                pass
        assert len({stream.result.text for stream in streams}) == 1
        assert {stream.result.usage.completion_tokens for stream in streams} == {200}


async def test_a_dead_router_is_restarted_and_the_death_of_all_ends_the_cluster(tmp_path: Path) -> None:
    reports: list[str] = []
    async with LocalCluster(config(2)) as cluster:
        address = cluster.router_address
        supervisor = ClusterSupervisor(cluster, tmp_path / "none.toml", config(2), reports.append)
        keeping = asyncio.create_task(supervisor.run())
        for name in ("router", "router-1"):
            os.kill(cluster.processes[name].pid, signal.SIGKILL)
            async with asyncio.timeout(20):
                while not any(report.startswith(f"{name} runs again") for report in reports):
                    await asyncio.sleep(0.05)
            assert cluster.processes[name].address == address
            async with outrider.AsyncClient(address) as client:
                assert len((await client.generate("x", max_tokens=4)).token_ids) == 4
        for name in ("router", "router-1"):
            os.kill(cluster.processes[name].pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="the router has ended"):
            await asyncio.wait_for(keeping, 10)


def test_pages_of_several_routers_have_ports_of_their_own() -> None:
    routers = config(3, metrics="127.0.0.1:9100", health="127.0.0.1:0").routers
    assert [one.metrics for one in routers] == ["127.0.0.1:9100", "127.0.0.1:9101", "127.0.0.1:9102"]
    assert {(one.health, one.share_port, one.count) for one in routers} == {("127.0.0.1:0", True, 1)}
    (alone,) = config(1).routers
    assert not alone.share_port


def test_a_ray_cluster_has_one_router() -> None:
    with pytest.raises(ConfigError, match=r"router\.count: .* give clients the addresses of all"):
        RayCluster(config(2), "auto")
