"""A Ray of our own, whose parts may be slow to start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long  # more than Ray itself waits

SLOW = """
import psutil, sys, threading, time
from outrider.fleet import ray_session

def freeze(seconds):
    while not (found := [child for child in psutil.Process().children() if child.name() == "raylet"]):
        time.sleep(0.01)
    found[0].suspend()
    time.sleep(seconds)
    found[0].resume()

ray_session.START_S = float(sys.argv[2])
threading.Thread(target=freeze, args=[float(sys.argv[1])], daemon=True).start()
with ray_session.on_ray(None, cpus=1):
    import ray
    print("nodes", len(ray.nodes()))
"""


def start(frozen_s: float, limit_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SLOW, str(frozen_s), str(limit_s)]
    return subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=110, check=False)


def test_a_node_may_take_longer_than_ray_waits() -> None:
    run = start(frozen_s=33.0, limit_s=100.0)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "nodes 1\n"


def test_a_session_that_does_not_start_in_time_is_reported() -> None:
    run = start(frozen_s=100.0, limit_s=1.0)
    assert run.returncode == 1
    assert "Unavailable: ray: none could be started here: a node did not start in 1 s" in run.stderr
