"""A gateway that a cluster's file asks for: real processes, certificates, signals and deaths."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from outrider.config import load_cluster
from outrider.fleet.cluster import LocalCluster
from outrider.rpc.certificates import make
from outrider.store.api_keys import Keys
from outrider.store.redis.client import connect
from outrider.telemetry.catalogue import METRICS
from tests.router.rig import FOLDER

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILE = f"""
[tls]
ca = "certs/ca.pem"
cert = "certs/{{role}}.pem"
key = "certs/{{role}}.key"
[router]
listen = "127.0.0.1:0"
models = {{ target = "{FOLDER}" }}
auth = "keys"
[gateway]
listen = "127.0.0.1:0"
timeout_s = 5.0
metrics = "127.0.0.1:0"
serve_metrics = true
[[verifier]]
model = "{FOLDER}"
slots = 4
"""

LINES: list[str] = []  # what its servers logged


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    make(folder / "certs")
    (folder / "cluster.toml").write_text(FILE, encoding="utf-8")
    async with LocalCluster(
        load_cluster(folder / "cluster.toml"), forward=lambda name, line: LINES.append(line)
    ) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client with a key, by HTTPS."""
    async with connect(cluster.redis_url) as redis:
        key, _ = await Keys(redis).add("tenant")
    trusted = ssl.create_default_context(cafile=str(_ca(cluster)))
    async with (
        httpx.AsyncClient(verify=trusted) as web,
        openai.AsyncOpenAI(base_url=_url(cluster), api_key=key, http_client=web, max_retries=0) as made,
    ):
        yield made


def _ca(cluster: LocalCluster) -> Path:
    ca: Path = cluster.processes["gateway"].section.ca  # type: ignore[attr-defined]
    return ca


def _url(cluster: LocalCluster) -> str:
    return f"https://{cluster.processes['gateway'].address}/v1"


async def test_the_gateway_has_its_own_certificate_and_forwards_keys_to_the_router(
    cluster: LocalCluster, client: openai.AsyncOpenAI
) -> None:
    assert [model.id async for model in client.models.list()] == ["target"]
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="another").models.list()
    async with httpx.AsyncClient() as web:
        with pytest.raises(httpx.ConnectError):  # the web's CAs did not sign its certificate
            await web.get(f"{_url(cluster)}/models")


async def test_the_gateways_metrics_have_their_own_port(client: openai.AsyncOpenAI) -> None:
    await client.completions.create(model="target", prompt="x", max_tokens=1)
    (page,) = {line.rpartition(" ")[2] for line in LINES if "gateway: metrics at " in line}
    async with httpx.AsyncClient() as web:
        shown = (await web.get(page)).text
    for metric in METRICS:
        if "gateway" in metric.role.split(", "):
            assert f"\n# TYPE {metric.exposed} " in shown
    assert re.search(r'outrider_gateway_requests_total\{.*path="/v1/completions",status="200"\} \d', shown)
    assert "\n# TYPE http_" not in shown


async def test_metrics_at_the_gateways_own_port_are_for_accepted_keys(
    cluster: LocalCluster, client: openai.AsyncOpenAI
) -> None:
    await client.models.list()
    path = _url(cluster).replace("/v1", "/metrics")
    trusted = ssl.create_default_context(cafile=str(_ca(cluster)))
    async with httpx.AsyncClient(verify=trusted) as web:
        shown = await web.get(path, headers={"authorization": f"Bearer {client.api_key}"})
        head = await web.head(path, headers={"x-api-key": client.api_key})
        strangers = [await web.get(path, headers=headers) for headers in ({}, {"x-api-key": "another"})]
    assert (shown.status_code, head.status_code, head.content) == (200, 200, b"")
    assert shown.headers["content-type"].startswith("text/plain; version=")
    assert re.search(r'outrider_gateway_requests_total\{.*path="/v1/models",status="200"\} \d', shown.text)
    assert [answer.status_code for answer in strangers] == [401, 401]
    assert all("outrider_gateway" not in answer.text for answer in strangers)


async def test_a_signal_lets_answers_end(cluster: LocalCluster, client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model="target", prompt="def f(", max_tokens=60, seed=1)
    stream = await client.completions.create(model="target", prompt="def f(", max_tokens=60, seed=1, stream=True)
    text = (await anext(stream)).choices[0].text
    gateway = cluster.processes["gateway"]
    os.kill(gateway.pid, signal.SIGTERM)
    async for piece in stream:
        text += piece.choices[0].text
    assert text == whole.choices[0].text
    assert await gateway.wait() == 0
    address = gateway.address
    await gateway.start(cluster.redis_url)
    assert gateway.address != address
    client.base_url = _url(cluster)
    assert [model.id async for model in client.models.list()] == ["target"]


async def _rest(stream: openai.AsyncStream[Any]) -> None:
    async for _ in stream:
        pass


async def test_the_death_of_the_verifier_is_an_event_of_openais_shape(
    cluster: LocalCluster, client: openai.AsyncOpenAI
) -> None:
    verifier = cluster.processes["verifier-0"]
    stream = await client.completions.create(model="target", prompt="def f(", max_tokens=900, seed=1, stream=True)
    await anext(stream)
    os.kill(verifier.pid, signal.SIGKILL)
    with pytest.raises(openai.APIError) as broken:
        await asyncio.wait_for(_rest(stream), 30)
    assert broken.value.type == "server_error"
    with pytest.raises(openai.InternalServerError) as refused:
        await client.completions.create(model="target", prompt="def f(", max_tokens=9)
    assert {broken.value.code, refused.value.code} <= {"unavailable", "timeout"}  # whichever is noticed first
