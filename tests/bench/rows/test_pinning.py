"""Processes stay on the cores that they were given, with all of their threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from bench.distance import options_of
from bench.rows.cluster import ClusterRow, running
from bench.rows.pinning import CoreSplit, pin, pinned, split_cores
from bench.rows.requests import BenchRequest
from outrider.errors import ConfigError
from tests.bench.rows.test_cluster import OPTIONS

# Two threads, and after a line a third one. Prints a line when the first two run and when the third has.
_THREADS = """
import sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("two", flush=True)
sys.stdin.readline()
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("three", flush=True)
sys.stdin.readline()
"""


def cores(pid: int) -> list[set[int]]:
    """The cores of each thread of a process; of those that do not end meanwhile."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):
            found.append(os.sched_getaffinity(int(thread)))
    return found


def test_pinning_a_process_holds_for_its_threads_and_those_started_later() -> None:
    core = {max(os.sched_getaffinity(0))}
    command = [sys.executable, "-c", _THREADS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "two\n"
        pin(child.pid, frozenset(core))
        assert cores(child.pid) == [core] * 2
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "three\n"
        assert cores(child.pid) == [core] * 3
    pin(child.pid, frozenset(core))  # it has ended


def test_this_process_is_pinned_within_the_block_alone() -> None:
    before, core, end = os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}, threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        assert other.native_id is not None
        with pinned(frozenset(core)):
            assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id) == core
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id) == before
    finally:
        end.set()
        other.join()


def test_the_verifier_has_the_first_core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 3, 8})
    assert split_cores() == CoreSplit(frozenset({3}), frozenset({5, 8}))


def test_a_machine_with_one_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    with pytest.raises(ConfigError, match="needs two cores, one for the verifier alone, and this process may use one"):
        split_cores()


def test_a_system_that_cannot_pin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ConfigError, match="cannot pin processes to cores; run it on Linux"):
        split_cores()


async def test_each_server_of_a_pinned_cluster_keeps_to_its_cores_and_its_passes_are_timed() -> None:
    split, target = split_cores(), Path("models/target")
    options = options_of(replace(OPTIONS, verifier={"threads": 2}), "always")
    async with running(options.cluster(target), split) as cluster:
        row, before = ClusterRow("always", cluster, None), await cluster.engine_time()
        # so long that the drafter takes part on a busy machine too
        await row.generate(BenchRequest((1, 2, 3), 0.0, 7, 960))
        idle = (await cluster.engine_time()).idle_since(before)
        assert {name: {*map(frozenset, cores(pid))} for name, pid in cluster.pids().items()} == {
            "verifier-0": {split.verifier},
            **{name: {split.others} for name in ("drafter-0", "router", "redis")},
        }
        assert 0.0 < idle.verifier < 1.0
        assert 0.0 < idle.drafter < 1.0
    assert options.verifier["threads"] == 1
