"""The scripts of a group's pods, as the manifests have them, on two hosts: they find each other, serve, and end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from outrider.rpc.channels import open_channel
from outrider.rpc.server import SERVING
from tests.deploy.manifests import ROOT, Manifest, environment, expanded, pods, rendered
from tests.fleet.hosts import Host, network, permitted

pytestmark = pytest.mark.long

# What the machines of a test do not have: GPUs, certificates, further cores.
FITTED = {
    "--model=/models/target": f"--model={ROOT / 'models' / 'target'}",
    "--tensor-parallel=8": "--tensor-parallel=2",
    "--device=cuda": "--spread",
    "--gpus=1": "--cpus=0.5",
    "--cpus=2": "--dtype=float32",
}


@pytest.mark.parametrize(("overlay", "leader_is"), [("gpu", "LWS_LEADER_ADDRESS"), ("kuberay", "FQ_RAY_IP")])
async def test_a_group_serves_where_its_probes_ask_and_ends_in_time(
    overlay: str, leader_is: str, redis_url: str
) -> None:
    if why := permitted():
        pytest.skip(why)
    pair = [pod for pod in pods(rendered(overlay)) if pod.component == "verifier"]
    with network(2) as (head, other):
        worker = start(other, overlay, pair[1].containers[0], redis_url, {leader_is: head.address})
        leader = start(head, overlay, pair[0].containers[0], redis_url, {"RAY_ADDRESS": "127.0.0.1:6379"})
        assert leader.stdout is not None
        lines = []
        async with asyncio.timeout(120):
            while not (found := re.search(r"listening on ([\d.]+):(\d+)", "".join(lines[-1:]))):
                lines.append(line := await asyncio.to_thread(leader.stdout.readline))
                assert line, "".join(lines)
        assert found[1] == head.address  # rank 0 is where it is looked for
        assert int(found[2]) == pair[0].ports["grpc"]
        assert await health(f"{head.address}:{pair[0].ports['health']}", "outrider.v1.Verifier") == SERVING
        for host, pod, port in ((head, pair[0], "gcs"), (other, pair[1], "raylet")):
            (await asyncio.open_connection(host.address, pod.ports[port]))[1].close()
        leader.send_signal(signal.SIGTERM)
        await asyncio.to_thread(leader.wait, pair[0].spec["terminationGracePeriodSeconds"])
        assert leader.returncode == 0
        assert worker.poll() is None


def start(
    host: Host, overlay: str, container: Manifest, redis_url: str, added: dict[str, str]
) -> subprocess.Popen[str]:
    """Runs a container's command on a host."""
    command = container["command"][2:]  # without tini, which is the image's
    found = environment(rendered(overlay), container)
    settings = {name: value for name, value in found.items() if name.startswith("RAY_")}
    named = {"POD_IP": host.address, "REDIS_URL": redis_url, "RAY_TMPDIR": str(host.folder), "ZONE": ""}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    arguments = [FITTED.get(it, expanded(it, named)) for it in container.get("args", [])]
    return host.start([*command, *arguments], subprocess.PIPE, **settings, **named, **added, PATH=path)


async def health(address: str, service: str) -> int:
    async with open_channel(address) as channel:
        try:
            answer = await HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=10)
        except grpc.aio.AioRpcError as error:
            raise AssertionError(error.details()) from None
        return int(answer.status)
