"""A worker of several ranks answers as one rank does, comes back when a rank is lost, and refuses what cannot be."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

import outrider
from outrider.config import DrafterConfig
from outrider.errors import CheckpointError, ConfigError, OutriderError, Unavailable
from outrider.fleet import ranks
from outrider.fleet.cluster import LocalCluster
from outrider.fleet.ray_cluster import RayCluster
from outrider.rpc.channels import open_channel
from outrider.rpc.server import NOT_SERVING, SERVING
from outrider.v1.types_pb2 import DescribeRequest
from outrider.v1.verifier_pb2_grpc import VerifierStub
from tests.engine.small_adapters import make_adapter
from tests.fleet.conftest import (
    ASKED,
    DRAFTER,
    TARGET,
    assert_same,
    config,
    end_node,
    free_port,
    generate_all,
    start_node,
)

NOTHING = TARGET.parent / "nothing"

pytestmark = pytest.mark.asyncio(loop_scope="session")


def ranks_of(parent: int) -> list[int]:
    """The processes of the ranks below a process."""
    found, below = [], {parent}
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [(int(row[0]), int(row[1]), row[2]) for row in (line.split(maxsplit=2) for line in listed.splitlines())]
    while more := {pid for pid, above, _ in rows if above in below} - below:
        below |= more
    for pid, _, command in rows:
        if pid in below and re.match(r"ray::Rank", command):
            found.append(pid)
    return found


async def health(address: str, service: str = "outrider.v1.Verifier") -> int:
    async with open_channel(address) as channel:
        answer = await HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=10)
        return int(answer.status)


async def test_two_ranks_on_their_own_ray_answer_like_one_and_recover(
    expected: list[outrider.Generation],
) -> None:
    lines: list[str] = []
    probes = f"127.0.0.1:{free_port()}"  # of the process that watches the ranks: no probe knows where rank 0 is
    async with LocalCluster(config(ranks=2, health=probes), forward=lambda name, line: lines.append(line)) as cluster:
        assert_same(await generate_all(cluster.router_address), expected)
        assert await health(probes) == SERVING
        verifier = cluster.processes["verifier-0"].pid
        running = ranks_of(verifier)
        assert len(running) == 2
        for rank in running:  # the compiled engine needs no torch
            assert "libtorch" not in Path(f"/proc/{rank}/maps").read_text()  # noqa: ASYNC240
        answers = asyncio.create_task(generate_all(cluster.router_address))
        await asyncio.sleep(0.05)
        assert not answers.done()
        os.kill(max(running), signal.SIGKILL)
        async with asyncio.timeout(30):
            while await health(probes) != NOT_SERVING:
                await asyncio.sleep(0.01)
        assert await health(probes, "") == SERVING  # the process that starts them again
        assert_same(await answers, expected)  # the sessions wait for the group, and go on
        assert await health(probes) == SERVING
        again = ranks_of(verifier)
        assert len(again) == 2
        assert not set(again) & set(running)
    assert any("all ranks are started again" in line for line in lines)
    async with asyncio.timeout(10):  # Ray's processes end behind those that they serve
        while any(os.path.exists(f"/proc/{pid}") for pid in again):  # noqa: ASYNC240
            await asyncio.sleep(0.05)


async def test_two_ranks_serve_an_adapter_like_one(tmp_path: Path) -> None:
    """The same texts with an adapter and without one, drafted for, as those of plain decoding on one rank."""
    make_adapter(TARGET, tmp_path / "sql", deviation=0.1)

    async def texts(ranks: int, drafters: int) -> list[outrider.Generation]:
        wanted = config(ranks=ranks, drafters=drafters, adapters=tmp_path)
        router = wanted.router.model_copy(update={"adapter_loaders": ("*",)})
        async with (
            LocalCluster(wanted.model_copy(update={"router": router})) as cluster,
            outrider.AsyncClient(cluster.router_address) as client,
        ):
            loaded = await client.load_adapter("sql", "sql")
            assert (loaded.name, loaded.rank) == ("sql", 4)
            speculation = "fixed" if drafters else "off"
            return await asyncio.gather(
                *(
                    client.generate(
                        prompt,
                        model=model,
                        max_tokens=48,
                        temperature=temperature,
                        seed=seed,
                        ignore_eos=True,
                        speculation=speculation,
                        timeout=60,
                    )
                    for prompt, temperature, seed in ASKED
                    for model in ("sql", "target")
                )
            )

    expected = await texts(ranks=1, drafters=0)
    assert all(with_it.text != without.text for with_it, without in zip(expected[::2], expected[1::2], strict=True))
    assert_same(await texts(ranks=2, drafters=1), expected)


async def test_the_modules_of_every_role_have_the_functions_that_ranks_call() -> None:
    for server, loading in ranks.SERVICES.values():
        assert [*signature(import_module(server).run).parameters] == ["config", "redis_url", "announce", "group"]
        assert [*signature(import_module(loading).load_part).parameters] == ["config", "group"]


@pytest.mark.long
async def test_four_ranks_and_a_drafter_of_two_run_on_an_existing_ray_cluster(
    expected: list[outrider.Generation], ray_address: str
) -> None:
    small = {"dtype": "float32", "tensor_parallel": 2, "cpus": 0.5}
    wanted = config(ranks=4, drafters=0).model_copy(update={"drafter": [DrafterConfig(model=DRAFTER, **small)]})
    async with RayCluster(wanted, ray_address) as cluster:
        assert_same(await generate_all(cluster.router_address), expected)
        async with open_channel(cluster.processes["verifier-0"].address) as channel:
            assert (await VerifierStub(channel).Describe(DescribeRequest())).ranks == 4
        async with outrider.AsyncClient(cluster.router_address) as client:
            alone = await client.generate(
                "def add(a, b):", max_tokens=64, ignore_eos=True, speculation="rounds", timeout=60
            )
            assert alone.usage.acceptance_length > 1.0
            answers = asyncio.create_task(generate_all(cluster.router_address))
            await cluster.scale([*wanted.drafters, *config().drafters])
            assert {"drafter-0", "drafter-1"} < cluster.processes.keys()
            await cluster.scale(config().drafters)
            assert {"drafter-0", "drafter-1"} & cluster.processes.keys() == {"drafter-1"}
            assert_same(await answers, expected)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"ranks": 3}, ConfigError, "3 ranks cannot share the 8 attention heads .* possible are 1, 2, 4, 8"),
        ({"ranks": 2, "gpus": 1.0}, ConfigError, "take 0.5 CPU and 1 GPU each, .* have room for 0"),
        ({"ranks": 2, "device": "cuda"}, ConfigError, "take 0.5 CPU and 1 GPU each, .* have room for 0"),
        ({"ranks": 64}, ConfigError, "have room for 16"),
        (
            {"model": NOTHING, "name": "target", "ranks": 2},
            CheckpointError,
            "no such folder",
        ),
    ],
)
async def test_ranks_that_cannot_be_are_refused_and_nothing_is_left(
    changes: dict[str, Any], error: type[OutriderError], reason: str, ray_address: str, redis_url: str
) -> None:
    section = config(ray=ray_address, **changes).verifier[0]
    with pytest.raises(error, match=reason):
        await asyncio.wait_for(ranks.run("verifier", section, redis_url, announce=lambda address: None), 60)
    give_up = time.monotonic() + 10
    while ranks_of(os.getpid()) and time.monotonic() < give_up:
        await asyncio.sleep(0.1)
    assert not ranks_of(os.getpid())


async def test_ranks_wait_for_nodes_that_are_still_joining(ray_address: str, redis_url: str) -> None:
    late: dict[str, Any] = {"ranks": 2, "resources": {"late": 1}, "model": NOTHING, "name": "target"}
    section = config(ray=ray_address, join_s=60, **late).verifier[0]
    node = start_node(f"--address={ray_address}", "--num-cpus=1", '--resources={"late": 2}')
    try:
        with pytest.raises(CheckpointError):  # so far only ranks come that have a place
            await asyncio.wait_for(ranks.run("verifier", section, redis_url, announce=lambda address: None), 100)
    finally:
        await asyncio.to_thread(end_node, node)


async def test_a_missing_ray_is_named_with_its_install_command(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[ray\]'"):
        await ranks.run("verifier", config(ranks=2).verifier[0], redis_url, announce=lambda address: None)
    assert dict(os.environ) == before


async def test_a_missing_ray_cluster_is_named(redis_url: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    section = config(ranks=2, ray=address).verifier[0]
    with pytest.raises(Unavailable, match=f"no cluster at {address}"):
        await ranks.run("verifier", section, redis_url, announce=lambda address: None)
