"""Two servers of vLLM, as users start them, with one drafter."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import yaml

from outrider.wire import drafter as wire
from running import OUTRIDER, REPOSITORY, TARGET, Drafter, running_drafter, wait_until

COMMIT = "0" * 40
DRAFTED = {"outrider_shared_noise": 1}
PLAIN = DRAFTED | {"outrider_drafts": 0}
PROMPTS = [f"The number {number} is" for number in range(6)]


@contextmanager
def server(drafters: list[str], metrics: int, folder: Path) -> Iterator[str]:
    """The address of a server, whose model has a name of the hub. `metrics`: port of the drafts' figures. `folder`: for
    its file, and for the hub's cache.
    """
    snapshot = folder / "hub/models--acme--target/snapshots" / COMMIT
    if not snapshot.exists():
        shutil.copytree(TARGET, snapshot)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs/main").write_text(COMMIT)
    told = {
        "model": "acme/target",
        "served-model-name": "target",
        "host": "127.0.0.1",
        "port": free_port(),
        "dtype": "float32",
        "max-model-len": 256,
        "max-num-seqs": 32,
        "enforce-eager": True,
        "speculative-config": {
            "method": "custom_class",
            "model": "outrider_vllm.RemoteDrafter",
            "num_speculative_tokens": 4,
        },
        "additional-config": {
            "outrider": {
                "drafters": drafters,
                "wait_ms": 30.0,
                "adaptive": False,
                "idle_s": 2.0,
                "metrics": f"127.0.0.1:{metrics}",
            }
        },
    }
    (folder / f"{metrics}.yaml").write_text(yaml.safe_dump(told))
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--config", f"{folder}/{metrics}.yaml"]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "HF_HOME": str(folder)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
    try:
        yield f"http://127.0.0.1:{told['port']}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def drafter() -> Iterator[Drafter]:
    with running_drafter() as it:
        yield it


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return int(it.getsockname()[1])


METRICS = [free_port(), free_port()]


@pytest.fixture(scope="module")
def servers(drafter: Drafter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        found = [stack.enter_context(server([drafter.address], port, folder)) for port in METRICS]
        for it in found:
            wait_until(lambda address=it: answers(address), within_s=240)
        yield found


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=2).is_success
    except httpx.TransportError:
        return False


async def text(client: openai.AsyncOpenAI, prompt: str, said: dict[str, int], **more: Any) -> str:
    """The answer to a prompt."""
    asked = {"max_tokens": 40, "temperature": 1.0, "seed": 7} | more
    found = await client.completions.create(model="target", prompt=prompt, extra_body={"vllm_xargs": said}, **asked)
    return found.choices[0].text


def sessions(drafter: Drafter) -> int:
    """Sessions that the drafter has."""
    with grpc.insecure_channel(drafter.address) as channel:
        return int(wire.DrafterStub(channel).Describe(wire.DescribeRequest(), timeout=5).sessions)


def counted(address: str, name: str) -> float:
    """The sum of the figures of one name."""
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def client_of(address: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_two_servers_share_a_drafter(servers: list[str]) -> None:
    async def texts(said: dict[str, int]) -> list[str]:
        clients = [client_of(address) for address in servers]
        return await asyncio.gather(*(text(client, prompt, said) for client in clients for prompt in PROMPTS))

    plain = asyncio.run(texts(PLAIN))
    assert plain[: len(PROMPTS)] == plain[len(PROMPTS) :]
    assert asyncio.run(texts(DRAFTED)) == plain
    for address, port in zip(servers, METRICS, strict=True):
        accepted = counted(address, "vllm:spec_decode_num_accepted_tokens_total")
        assert accepted > 0
        assert counted(f"http://127.0.0.1:{port}", "outrider_upstream_accepted_tokens_total") == accepted
        assert counted(f"http://127.0.0.1:{port}", "outrider_upstream_drafters") == 1
        assert counted(f"http://127.0.0.1:{port}", 'outrider_upstream_rows_total{why="drafting"}') > 0
        command = [OUTRIDER, "-P", "-m", "outrider.cli", "top", f"127.0.0.1:{port}", "--once", "--every", "0.1"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
        assert "drafter" in shown
        assert "target" in shown


def test_aborted_requests_leave_no_session(servers: list[str], drafter: Drafter) -> None:
    async def abort(number: int) -> None:
        client = client_of(servers[number % 2])
        stream = await client.completions.create(
            model="target", prompt=PROMPTS[number % 6], max_tokens=200, temperature=1.0, stream=True,
            extra_body={"vllm_xargs": DRAFTED, "ignore_eos": True},
        )  # fmt: skip
        async for _ in stream:
            break
        await stream.close()
        await client.close()

    async def abort_many() -> None:
        await asyncio.gather(*map(abort, range(40)))

    asyncio.run(abort_many())
    wait_until(lambda: sessions(drafter) == 0)
    assert asyncio.run(text(client_of(servers[0]), "One", DRAFTED)) == asyncio.run(
        text(client_of(servers[0]), "One", PLAIN)
    )


def test_a_thousand_short_requests_leave_no_session(servers: list[str], drafter: Drafter) -> None:
    async def ask() -> None:
        client, free = client_of(servers[0]), asyncio.Semaphore(32)

        async def one(number: int) -> None:
            async with free:
                await text(client, f"{number}", DRAFTED, max_tokens=1 + number % 4, seed=number)

        await asyncio.gather(*map(one, range(1000)))

    asyncio.run(ask())
    wait_until(lambda: sessions(drafter) == 0)
