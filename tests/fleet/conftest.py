"""A Ray cluster of one node with room for many, and the answers of a cluster, whatever it runs on."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_asyncio

import outrider
from outrider.cli.verification.compare import TOLERANCE, Verdict, verdict
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.errors import Unavailable
from outrider.fleet.cluster import LocalCluster

ROOT = Path(__file__).parents[2]
TARGET, DRAFTER = ROOT / "models" / "target", ROOT / "models" / "drafter"
RAY = str(Path(sys.executable).parent / "ray")
SOURCE = (ROOT / "models" / "README.md").read_text(encoding="utf-8")
ASKED = [  # prompt, temperature, seed; two are longer than a prefill chunk
    ("def add(a, b):", 0.0, 1),
    ("class Stack:\n    def push(self", 0.8, 2),
    (SOURCE[:900], 0.6, 3),
    ("import os\n", 1.0, 4),
    (SOURCE[200:1500], 0.8, 5),
    ("for x in range(10):", 1.0, 6),
]


def config(ranks: int = 1, drafters: int = 1, **verifier: object) -> ClusterConfig:
    """The reference target and drafters, in fp32."""
    return ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": TARGET}, cpus=0.1),
        verifier=[
            VerifierConfig.model_validate(
                {"model": TARGET, "dtype": "float32", "tensor_parallel": ranks, "cpus": 0.5, **verifier}
            )
        ],
        drafter=[DrafterConfig(model=DRAFTER, dtype="float32", cpus=0.1)] * drafters,
    )


async def generate_all(address: str) -> list[outrider.Generation]:
    """Answers to all that is asked, at once. A caller whose retries are used up comes back until it has its answer."""
    async with outrider.AsyncClient(address) as client:
        return await asyncio.gather(*(_answer(client, *asked) for asked in ASKED))


async def _answer(client: outrider.AsyncClient, prompt: str, temperature: float, seed: int) -> outrider.Generation:
    session = ""
    async with asyncio.timeout(90):
        while True:
            stream = (
                client.resume(session)
                if session
                else client.stream(prompt, max_tokens=48, temperature=temperature, seed=seed, ignore_eos=True)
            )
            try:
                async for _ in stream:
                    pass
                return stream.result
            except Unavailable:
                session = session or stream.session_id
                await asyncio.sleep(1.0)


def assert_same(answers: list[outrider.Generation], expected: list[outrider.Generation]) -> None:
    """The texts are equal but for choices that rounding may decide, of which there is at most one."""
    verdicts = [verdict(one, other, TOLERANCE["float32"]) for one, other in zip(answers, expected, strict=True)]
    assert Verdict.BUG not in verdicts
    assert verdicts.count(Verdict.NEAR_TIE) <= 1


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def expected() -> list[outrider.Generation]:
    """The answers of one rank, with no drafter."""
    async with LocalCluster(config(drafters=0)) as cluster:
        return await generate_all(cluster.router_address)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def start_node(*arguments: str, inside: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """A Ray node that ends with the process. `inside`: a command that runs it somewhere else."""
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_pipe_based_agent_to_parent_health_check": "1"}
    memory = "--object-store-memory=80000000"
    return subprocess.Popen(
        [*inside, RAY, "start", *arguments, memory, "--block"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **settings},
        start_new_session=True,
    )


def end_node(node: subprocess.Popen[bytes]) -> None:
    node.send_signal(signal.SIGTERM)
    try:
        node.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Of a cluster that has room for eight CPUs' worth, whatever this machine has."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        node = start_node(
            "--head", f"--port={port}", "--num-cpus=8", "--include-dashboard=false", f"--temp-dir={folder}"
        )
        address = f"127.0.0.1:{port}"
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            if subprocess.run([RAY, "health-check", "--address", address], capture_output=True).returncode == 0:
                break
            assert node.poll() is None
            time.sleep(0.2)
        try:
            yield address
        finally:
            end_node(node)
