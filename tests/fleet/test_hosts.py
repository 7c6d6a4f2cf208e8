"""A Ray cluster over several hosts, each a network namespace: the text is the target's, and a lost host is survived."""

from __future__ import annotations

import asyncio
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import outrider
from tests.fleet.conftest import DRAFTER, RAY, TARGET, assert_same, generate_all
from tests.fleet.hosts import Host, network, permitted

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

PORT = 6379
CLUSTER = f"""
[router]
listen = "127.0.0.1:7070"
models = {{ target = "{TARGET}" }}
cpus = 0.1
resources = {{ front = 1 }}
[[verifier]]
model = "{TARGET}"
dtype = "float32"
tensor_parallel = 2
spread = true
cpus = 0.1
resources = {{ rank = 1 }}
[[drafter]]
model = "{DRAFTER}"
dtype = "float32"
cpus = 0.1
resources = {{ edge = 1 }}
"""


@pytest.fixture(scope="module", autouse=True)
def _permitted() -> None:
    if why := permitted():
        pytest.skip(why)


class Up:
    """`outrider up --ray` on the first host, and what it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.lines: list[str] = []

    async def matching(self, pattern: str, timeout: float = 60.0) -> re.Match[str]:
        """Waits for a line."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout):
                while True:
                    line = await asyncio.to_thread(self._process.stdout.readline)
                    assert line, "".join(self.lines)
                    self.lines.append(line)
                    if match := re.search(pattern, line):
                        return match
        except TimeoutError:
            raise AssertionError(f"no {pattern!r} in {''.join(self.lines)}") from None


@contextmanager
def ray_over(hosts: list[Host], resources: list[str], folder: Path, **environment: str) -> Iterator[Up]:
    """A Ray cluster over the hosts, and our cluster on it."""
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
        "RAY_health_check_timeout_ms": "1000",
    }
    file = folder / "cluster.toml"
    file.write_text(CLUSTER, encoding="utf-8")
    head, *others = hosts
    common = ["--num-cpus=1", "--object-store-memory=80000000", "--block"]
    starts = [[RAY, "start", f"--node-ip-address={host.address}", *common] for host in hosts]
    starts[0] += [
        "--head",
        "--include-dashboard=false",
        f"--port={PORT}",
        f"--temp-dir={head.folder}",
        f"--resources={resources[0]}",
    ]
    head.start(starts[0], **settings)
    address = f"{head.address}:{PORT}"
    waiting = f"until {RAY} health-check --address {address}; do sleep 0.3; done"
    head.start(["sh", "-c", waiting], **settings).communicate(timeout=60)
    for host, start, own in zip(others, starts[1:], resources[1:], strict=True):
        host.start([*start, f"--address={address}", f"--resources={own}"], **settings)
    seen = f"import ray, time; ray.init('{address}')\nwhile len(ray.nodes()) < {len(hosts)}: time.sleep(0.2)"
    head.start([sys.executable, "-c", seen], **settings).communicate(timeout=60)
    up = [sys.executable, "-m", "outrider.cli", "up", "--ray", address, str(file)]
    yield Up(head.start(up, subprocess.PIPE, COLUMNS="120", **settings))


async def test_ranks_of_a_lost_host_restart_on_the_remaining_hosts(
    expected: list[outrider.Generation], tmp_path: Path
) -> None:
    """The third host has one rank and the drafter, and goes: the ranks are started again on the second."""
    resources = ['{"front": 1}', '{"rank": 2}', '{"rank": 1, "edge": 1}']
    with network(3) as hosts, ray_over(hosts, resources, tmp_path) as up:
        ready = await up.matching(r"Try: outrider generate --address (\S+)")
        assert ready[1].startswith(hosts[0].address)
        assert_same(await generate_all(ready[1]), expected)
        answers = asyncio.create_task(generate_all(ready[1]))
        await asyncio.sleep(0.2)
        hosts[2].cut_off()
        await up.matching("all ranks are started again")
        assert_same(await answers, expected)
        assert_same(await generate_all(ready[1]), expected)
