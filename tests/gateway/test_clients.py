"""The gateway calls the router with each caller's own key, over connections whose number is limited."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from outrider.config import GatewayConfig
from outrider.errors import ConfigError
from outrider.gateway import clients
from outrider.gateway.server import server
from tests.gateway.conftest import GatewayHarness, gateway_harness
from tests.router.fakes import FakeVerifier
from tests.router.rig import SCRIPT, until


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of clients that were closed, in their order; two are kept."""
    keys: list[str] = []
    close = clients.AsyncClient.close

    async def noted(client: clients.AsyncClient) -> None:
        keys.extend(value.removeprefix("Bearer ") for _, value in client._router.metadata)
        await close(client)

    monkeypatch.setattr(clients.AsyncClient, "close", noted)
    monkeypatch.setattr(clients, "MAX_CLIENTS", 2)
    return keys


async def test_the_oldest_client_without_a_call_is_closed_first(redis_url: str, closed: list[str]) -> None:
    async with (
        gateway_harness(redis_url, FakeVerifier(SCRIPT, pace_s=0.05)) as harness,
        httpx.AsyncClient(base_url=harness.url) as web,
    ):
        first = asyncio.create_task(_stream(harness, web))
        await until(lambda: harness.verifier.steps > 0)
        for key in ("second", "third"):
            await _models(web, key)
        assert closed == ["second"]  # the first one's answer still runs
        await _models(web, "fourth")
        assert closed == ["second", "third"]
        assert await first == "[DONE]"
        await _models(web, "fifth")
        assert closed == ["second", "third", "first"]


async def _stream(harness: GatewayHarness, web: httpx.AsyncClient) -> str:
    asked = {"model": "target", "prompt": "x", "max_tokens": 12, "stream": True}
    answer = await web.post("/v1/completions", json=asked, headers={"authorization": "Bearer first"})
    return answer.text.strip().rpartition("data: ")[2]


async def _models(web: httpx.AsyncClient, key: str) -> None:
    assert (await web.get("/v1/models", headers={"authorization": f"bearer {key}"})).status_code == 200


async def test_a_key_that_cannot_be_one_is_refused_as_such(harness: GatewayHarness) -> None:
    async with httpx.AsyncClient(base_url=harness.url) as web:
        answer = await web.get("/v1/models", headers={"authorization": "Bearer two words"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_a_router_that_no_key_may_be_sent_to_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="tls=False if the way there is safe"):
        server(GatewayConfig(router="192.0.2.1:7070"))
