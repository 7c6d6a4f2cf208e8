"""`outrider up` holds a cluster to its file, on this machine and on Ray; and every example starts and is exact."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.cli.verification.compare import TOLERANCE, Verdict, verdict
from outrider.config import ClusterConfig, load_cluster
from outrider.errors import ConfigError, Unavailable
from outrider.fleet.cluster import Cluster, LocalCluster
from outrider.fleet.ray_cluster import RayCluster
from outrider.fleet.supervisor import ClusterSupervisor
from tests.fleet.conftest import DRAFTER, ROOT, TARGET, assert_same, generate_all

pytestmark = pytest.mark.asyncio(loop_scope="session")

FILE = f"""
[router]
listen = "127.0.0.1:0"
models = {{ target = "{TARGET}" }}
cpus = 0.1
[[verifier]]
model = "{TARGET}"
dtype = "float32"
slots = 8
cpus = 0.5
"""
DRAFTERS = f"""
[[drafter]]
model = "{DRAFTER}"
dtype = "float32"
count = COUNT
cpus = 0.1
"""
Make = Callable[[ClusterConfig], Cluster[Any]]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.toml"))


@pytest.fixture(params=["here", pytest.param("ray", marks=pytest.mark.long)])
def make(request: pytest.FixtureRequest) -> Make:
    """A cluster of either kind."""
    if request.param == "here":
        return LocalCluster
    address: str = request.getfixturevalue("ray_address")
    return lambda config: RayCluster(config, address)


@asynccontextmanager
async def kept(make: Make, file: Path) -> AsyncIterator[tuple[Cluster[Any], list[str]]]:
    """A cluster with its keeper, and what that reports."""
    config = load_cluster(file)
    lines: list[str] = []
    async with make(config) as cluster:
        keeping = asyncio.create_task(ClusterSupervisor(cluster, file, config, lines.append).run())
        try:
            yield cluster, lines
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError, Unavailable):
                await keeping


async def until(holds: Callable[[], bool], what: object) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.1)
    assert holds(), what


async def test_drafters_are_added_and_removed_and_killed_servers_return_while_sessions_run(
    make: Make, tmp_path: Path, expected: list[outrider.Generation]
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE + DRAFTERS.replace("COUNT", "1"), encoding="utf-8")
    async with kept(make, file) as (cluster, lines):
        generating = asyncio.create_task(_generate(cluster.router_address, expected))
        file.write_text(FILE + DRAFTERS.replace("COUNT", "3"), encoding="utf-8")
        await until(lambda: {"drafter-1", "drafter-2"} <= cluster.processes.keys(), lines)
        file.write_text("[router]\nlisten =", encoding="utf-8")
        await until(lambda: any("not valid TOML" in line for line in lines), lines)
        file.write_text(FILE.replace("slots = 8", "slots = 4") + DRAFTERS.replace("COUNT", "3"), encoding="utf-8")
        await until(lambda: any("only drafters can change" in line for line in lines), lines)
        file.write_text(FILE + DRAFTERS.replace("COUNT", "2"), encoding="utf-8")
        await until(lambda: len(cluster.processes) == 4, lines)
        drafter = next(server for server in cluster.processes.values() if server.role == "drafter")
        os.kill(int(drafter.where.split()[1]), signal.SIGKILL)
        await until(lambda: any(f"{drafter.name} runs again" in line for line in lines), lines)
        os.kill(int(cluster.processes["verifier-0"].where.split()[1]), signal.SIGKILL)
        await until(lambda: any("verifier-0 runs again" in line for line in lines), lines)
        generating.cancel()
        with suppress(asyncio.CancelledError):
            await generating
        assert_same(await generate_all(cluster.router_address), expected)


@pytest.mark.timeout(240)  # more than all that is waited for below, so that what was printed is shown
async def test_the_command_serves_on_a_ray_and_ends_everything_on_a_signal(
    ray_address: str, tmp_path: Path, expected: list[outrider.Generation]
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE + DRAFTERS.replace("COUNT", "1"), encoding="utf-8")
    up = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "faulthandler", "-m", "outrider.cli", "up", "--ray", ray_address, str(file)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert up.stdout is not None
    printed = bytearray()
    try:
        async with asyncio.timeout(90):
            await _read(up.stdout, printed, until=b"Try: ")
            (address,) = set(re.findall(r"router is ready on (\S+:\d+)", printed.decode()))
            assert_same(await generate_all(address), expected)
        up.send_signal(signal.SIGINT)
        await asyncio.wait_for(_read(up.stdout, printed), 30)
    finally:
        if not up.stdout.at_eof():
            up.send_signal(signal.SIGABRT)  # it prints where each of its threads is
            await asyncio.wait_for(_read(up.stdout, printed), 10)
        status = await up.wait()
        print(printed.decode())
    assert status in (0, 130)
    with pytest.raises(Unavailable):
        async with outrider.AsyncClient(address, retries=0) as client:
            await client.models()


@pytest.mark.parametrize("token", ["another" * 8, ""], ids=["another", "none"])
async def test_a_ray_cluster_that_demands_another_token_is_named_at_once(
    ray_address: str, tmp_path: Path, token: str
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE, encoding="utf-8")
    up = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.cli", "up", "--ray", ray_address, str(file)),
        stderr=subprocess.PIPE,
        env={**os.environ, "RAY_AUTH_TOKEN": token, "HOME": str(tmp_path)},
    )
    _, printed = await asyncio.wait_for(up.communicate(), 60)
    assert up.returncode == 2
    assert f"no cluster at {ray_address}" in printed.decode()
    assert "token" in printed.decode().splitlines()[-1]


async def _read(stream: asyncio.StreamReader, printed: bytearray, *, until: bytes | None = None) -> None:
    """Adds what is printed up to a line that has `until`, or to the end."""
    async for line in stream:
        printed += line
        if until is not None and until in line:
            return


async def _generate(address: str, expected: list[outrider.Generation]) -> None:
    while True:
        assert_same(await generate_all(address), expected)


async def test_the_end_of_the_router_ends_the_cluster(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE, encoding="utf-8")
    config = load_cluster(file)
    async with LocalCluster(config) as cluster:
        keeping = asyncio.create_task(ClusterSupervisor(cluster, file, config, lambda line: None).run())
        os.kill(cluster.processes["router"].pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="the router has ended"):
            await asyncio.wait_for(keeping, 10)


@pytest.mark.parametrize("example", EXAMPLES)
async def test_every_example_gives_equal_answers_with_and_without_speculation(
    example: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    for model in ("target", "mid", "drafter", "large"):  # the padded one says what it says unpadded
        (tmp_path / "models" / model).symlink_to(ROOT / "models" / ("target" if model == "large" else model))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    config = load_cluster(tmp_path / "examples" / f"{example}.toml")
    config = config.model_copy(update={"router": config.router.model_copy(update={"listen": "127.0.0.1:0"})})
    cluster: Cluster[Any] = (
        RayCluster(config, request.getfixturevalue("ray_address")) if example == "ray" else LocalCluster(config)
    )
    async with cluster, outrider.AsyncClient(cluster.router_address) as client:
        for temperature in (0.0, 0.7):
            asked: dict[str, Any] = {"max_tokens": 48, "temperature": temperature, "seed": 3, "ignore_eos": True}
            plain = await client.generate("class Queue:\n    def ", **asked, speculation="off")
            answer = await client.generate("class Queue:\n    def ", **asked)
            assert plain.usage.verified == 0
            assert verdict(answer, plain, TOLERANCE["bfloat16"]) is not Verdict.BUG


@pytest.mark.parametrize(
    "key", ["router.listen", "router.metrics", "router.health", "gateway.listen", "verifier.0.listen"]
)
async def test_a_busy_port_is_told_before_any_server_starts(tmp_path: Path, key: str) -> None:
    section, _, name = key.rpartition(".")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        values: dict[str, Any] = {
            "router": {"listen": "127.0.0.1:0", "models": {"target": str(TARGET)}},
            "verifier": [{"model": str(TARGET)}],
            "gateway": {"listen": "127.0.0.1:0"},
        }
        (values["verifier"][0] if section == "verifier.0" else values[section])[name] = address
        seen: list[object] = []
        cluster = LocalCluster(ClusterConfig(**values), ready=seen.append)
        with pytest.raises(ConfigError, match=rf"^{key}: cannot bind {address} \(Address already in use\); choose "):
            await cluster.__aenter__()
    assert (seen, cluster.redis_url) == ([], "")


async def test_up_ends_with_one_sentence_where_the_gateways_port_is_busy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (tmp_path / "cluster.toml").write_text(f'{FILE}[gateway]\nlisten = "{address}"\n')
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "outrider.cli", "up", str(tmp_path / "cluster.toml")],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert line.startswith(f"outrider: gateway.listen: cannot bind {address} (Address already in use); choose ")
