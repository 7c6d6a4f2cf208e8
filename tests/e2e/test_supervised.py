"""Every long-lived task of a real cluster fails once: it is noticed, counted and recovered, and no text is harmed."""

from __future__ import annotations

import asyncio
import re
import sys
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

import outrider
from outrider.config import load_cluster
from outrider.fleet.cluster import LocalCluster
from outrider.fleet.process import Process
from outrider.fleet.supervisor import ClusterSupervisor
from tests.e2e.conftest import MODELS
from tests.failing import FAIL_ONCE
from tests.loops import stalls

FILE = f"""
[router]
listen = "127.0.0.1:0"
models = {{ target = "{MODELS / "target"}" }}
metrics = "127.0.0.1:0"
policy = "fixed"
depth = 4
[[verifier]]
model = "{MODELS / "target"}"
dtype = "float32"
metrics = "127.0.0.1:0"
[[drafter]]
model = "{MODELS / "drafter"}"
dtype = "float32"
learns = true
metrics = "127.0.0.1:0"
"""
KEPT = {  # tasks that are run again, by server
    "router": {
        "loop lag",
        "fleet",
        "history",
        "ticket key",
        "storage",
        "sweep",
        "warm start",
        "session events",
        "training samples",
        "tree view",
    },
    "verifier": {"loop lag", "announcement", "ticket keys"},
    "drafter": {"loop lag", "announcement", "learning", "ticket keys", "upstream"},
}
NEEDED = {"verifier": "step loop", "drafter": "growth"}  # tasks whose end ends the process
FAILED = re.compile(r"task '(.+)' failed; (it is started again|the process ends)")
COUNTED = re.compile(r'^outrider_tasks_failed_total\{.*task="([^"]+)".*\} (\S+)$', re.MULTILINE)


async def counted(page: str) -> dict[str, float]:
    """How often each task has failed, as a server reports it."""

    def read() -> str:
        with urllib.request.urlopen(page, timeout=10) as answer:
            return str(answer.read().decode())

    return {name: float(value) for name, value in COUNTED.findall(await asyncio.to_thread(read))}


@pytest.mark.timeout(180)
async def test_a_cluster_survives_one_failure_of_every_long_lived_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE, encoding="utf-8")
    config, lines, reports = load_cluster(file), list[tuple[str, str]](), list[str]()
    first, then = tmp_path / "first", tmp_path / "then"
    faults = {name: first for names in KEPT.values() for name in names} | dict.fromkeys(NEEDED.values(), then)
    at_faults = ",".join(f"{name}@{path}" for name, path in faults.items())

    async def run(_: Process, arguments: Sequence[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", "tests.failing", *arguments]
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        return await asyncio.create_subprocess_exec(*command, env={**environment, FAIL_ONCE: at_faults}, **pipes)

    monkeypatch.setattr(Process, "_run", run)

    def failed(server: str) -> Counter[str]:
        return Counter(found[1] for name, line in lines if name.startswith(server) and (found := FAILED.search(line)))

    async with LocalCluster(config, forward=lambda name, line: lines.append((name, line))) as cluster:
        monkeypatch.undo()  # what is started again does not fail
        keeping = asyncio.create_task(ClusterSupervisor(cluster, file, config, reports.append).run())
        pages = {name: line.rpartition(" ")[2] for name, line in lines if ": metrics at " in line}
        texts: set[str] = set()
        async with outrider.AsyncClient(cluster.router_address) as client:

            async def answer() -> outrider.Generation:
                one = await client.generate("def main(", max_tokens=60, temperature=0.0, timeout=60)
                texts.add(one.text)
                return one

            async with asyncio.timeout(100):
                await answer()
                first.touch()
                while any(failed(server) != Counter(names) for server, names in KEPT.items()):
                    await answer()
                for server, names in KEPT.items():
                    page = next(page for name, page in pages.items() if name.startswith(server))
                    expected = dict.fromkeys(names, 1.0) | ({NEEDED[server]: 0.0} if server in NEEDED else {})
                    assert await counted(page) == expected
                assert not any((await stalls(pages.values())).values()), "none of that held up an event loop"
                then.touch()
                while sum("runs again" in report for report in reports) < len(NEEDED):
                    await answer()
                while (await answer()).usage.accepted == 0:
                    await asyncio.sleep(0.1)
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
    assert len(texts) == 1
    for server, name in NEEDED.items():
        assert failed(server) == Counter({*KEPT[server], name}), (server, failed(server))
        assert any(report.startswith(server) and "ended with status 1" in report for report in reports), reports
