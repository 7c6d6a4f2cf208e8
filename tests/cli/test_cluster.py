"""A local cluster starts as real processes, reports what ends, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import outrider
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.errors import ConfigError
from outrider.fleet.cluster import LocalCluster

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "models" / "target"
DRAFTER = ROOT / "models" / "drafter"


def config(*, drafter: Path = DRAFTER) -> ClusterConfig:
    return ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": TARGET}),
        verifier=[VerifierConfig(model=TARGET, slots=2, context=128)],
        drafter=[DrafterConfig(model=drafter, slots=2, context=128)],
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_gone(pids: list[int]) -> None:
    give_up = time.monotonic() + 10
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not left


async def test_a_cluster_serves_reports_a_killed_process_and_stops_the_rest() -> None:
    started: list[str] = []
    async with LocalCluster(config(), ready=lambda process: started.append(process.name)) as cluster:
        assert sorted(started) == ["drafter-0", "router", "verifier-0"]
        pids = [process.pid for process in cluster.processes.values()]
        async with outrider.AsyncClient(cluster.router_address) as client:
            (model,) = await client.models()
            assert (model.verifiers, model.drafters) == (1, 1)
            result = await client.generate("def f(", max_tokens=8, timeout=30)
            assert result.usage.completion_tokens == len(result.token_ids) <= 8
        os.kill(cluster.processes["drafter-0"].pid, signal.SIGKILL)
        ended = await asyncio.wait_for(cluster.next_end(), 10)
        assert (ended.name, ended.status) == ("drafter-0", -signal.SIGKILL)
    assert_gone(pids)
    assert {process.name: process.status for process in cluster.processes.values()} == {
        "router": 0,
        "verifier-0": 0,
        "drafter-0": -signal.SIGKILL,
    }


async def test_a_start_that_fails_leaves_nothing_running() -> None:
    cluster = LocalCluster(config(drafter=ROOT / "models" / "nothing"))
    with pytest.raises(ConfigError, match=r"drafter-0: .*models/nothing"):
        await cluster.__aenter__()
    assert None not in [process.status for process in cluster.processes.values()]


def up(folder: Path) -> tuple[subprocess.Popen[str], list[int], str]:
    """`outrider up` as a process; the pids of its servers and the router's address, from the table it prints."""
    file = folder / "cluster.toml"
    file.write_text(
        f'[router]\nlisten = "127.0.0.1:0"\nmodels = {{ target = "{TARGET}" }}\n'
        f'[[verifier]]\nmodel = "{TARGET}"\nslots = 4\n'
    )
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "outrider.cli", "up", str(file)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "COLUMNS": "100"},
        )
    assert process.stdout is not None
    pids, address = [process.pid], ""
    for line in process.stdout:
        if match := re.search(r"(router|verifier-0)\W+(\S+:\d+)\W+pid (\d+)", line):
            pids.append(int(match[3]))
            address = match[2] if match[1] == "router" else address
        if line.startswith("Try:"):
            break
    assert len(pids) == 3
    return process, pids, address


def test_up_serves_and_stops_everything_on_a_signal(tmp_path: Path) -> None:
    process, pids, address = up(tmp_path)
    example = [sys.executable, str(ROOT / "examples" / "generate.py"), address]
    done = subprocess.run(example, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    process.terminate()
    process.communicate(timeout=15)
    assert process.returncode == 0
    assert_gone(pids)
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert all(re.fullmatch(r"(router|verifier-0) is ready on 127\.0\.0\.1:\d+", line) for line in lines), lines


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process's life to its parent's")
def test_killing_up_kills_its_servers(tmp_path: Path) -> None:
    process, pids, _ = up(tmp_path)
    process.kill()
    process.communicate(timeout=15)
    assert_gone(pids)
