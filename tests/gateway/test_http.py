"""What programs and browsers ask of an HTTP server before they ask a model."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from outrider.gateway import respond
from tests.gateway.conftest import GatewayHarness, gateway_harness
from tests.router.fakes import FakeVerifier
from tests.router.rig import SCRIPT

PAGE, OTHER = "https://chat.example.org", "https://other.example.org"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


async def test_every_response_has_an_id_which_the_caller_may_choose(harness: GatewayHarness) -> None:
    async with httpx.AsyncClient(base_url=harness.url) as web:
        chosen = await web.get("/version", headers={"x-request-id": "a-1"})
        drawn = [(await web.get("/nothing", headers={"x-request-id": given})).headers for given in ("x y", "z" * 200)]
    assert chosen.headers["x-request-id"] == "a-1"
    assert len({headers["x-request-id"] for headers in drawn}) == 2
    assert all(headers["x-request-id"].startswith("req_") for headers in drawn)


async def test_paths_that_are_read_have_a_head(harness: GatewayHarness) -> None:
    async with httpx.AsyncClient(base_url=harness.url) as web:
        for path in ("/health", "/version", "/v1/models", "/v1/models/target"):
            got, head = await web.get(path), await web.head(path)
            assert (got.status_code, head.status_code, head.content) == (200, 200, b"")
        assert (await web.get("/v1/models/target")).json()["max_model_len"] > 0
        assert (await web.get("/version")).json()["version"]


async def test_there_are_no_metrics_at_the_gateways_port_unless_it_is_configured(harness: GatewayHarness) -> None:
    async with httpx.AsyncClient(base_url=harness.url) as web:
        for path in ("/metrics", "/metrics/", "/metrics/vllm", "/alive"):
            assert (await web.get(path)).status_code == 404, path


@pytest.mark.parametrize(
    ("allowed", "origin", "taken"), [((PAGE,), PAGE, True), ((PAGE,), OTHER, False), ((), PAGE, False)]
)
async def test_pages_of_named_origins_alone_may_call_from_a_browser(
    redis_url: str, allowed: tuple[str, ...], origin: str, taken: bool
) -> None:
    async with (
        gateway_harness(redis_url, gateway={"cors_origins": allowed}) as harness,
        httpx.AsyncClient(base_url=harness.url, headers={"origin": origin}) as web,
    ):
        asked = await web.options("/v1/chat/completions", headers=PREFLIGHT)
        answered = await web.get("/v1/models")
    assert (asked.status_code == 200) is taken
    assert (answered.headers.get("access-control-allow-origin") == origin) is taken


async def test_a_stream_that_waits_has_its_headers_and_signs_of_life(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(respond, "HEADERS_S", 0.1)
    asked = {"model": "target", "prompt": "x", "max_tokens": 3, "stream": True}
    async with (
        gateway_harness(redis_url, FakeVerifier(SCRIPT, pace_s=0.5), gateway={"keep_alive_s": 0.1}) as harness,
        httpx.AsyncClient(base_url=harness.url) as web,
        web.stream("POST", "/v1/completions", json=asked) as answer,
    ):
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[0] == ": keep-alive"
    assert lines.count(": keep-alive") >= 3
    assert len([line for line in lines if line.startswith("data: {")]) == 4
    assert lines[-1] == "data: [DONE]"


async def test_an_error_behind_the_headers_is_an_event(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "HEADERS_S", 0.1)
    asked = {"model": "target", "prompt": "x", "max_tokens": 3, "stream": True}
    verifier = FakeVerifier(SCRIPT, pace_s=5.0)
    async with (
        gateway_harness(redis_url, verifier, gateway={"keep_alive_s": 0.3, "timeout_s": 1.0}) as harness,
        openai.AsyncOpenAI(base_url=f"{harness.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        create: Any = client.completions.create
        with pytest.raises(openai.APIError) as failed:
            [part async for part in await create(**asked)]
    assert failed.value.code == "timeout"
