"""A gateway on a port of its own, in front of a router with a real Redis and a scripted verifier."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider.config import GatewayConfig
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.server import bound, server
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import FOLDER, MODEL, SCRIPT, Rig, running_router


@dataclass(frozen=True)
class GatewayHarness:
    """A gateway, and what is behind it."""

    url: str
    client: openai.AsyncOpenAI
    rig: Rig
    verifier: FakeVerifier
    metrics: GatewayMetrics


@asynccontextmanager
async def gateway_harness(
    redis_url: str,
    verifier: FakeVerifier | None = None,
    *,
    gateway: dict[str, Any] | None = None,
    digest: bytes = MODEL.digest,
    vocabulary: int = 4096,
    **router: Any,
) -> AsyncIterator[GatewayHarness]:
    """`digest` and `vocabulary`: of the model's tokenizer."""
    verifier = verifier or FakeVerifier(SCRIPT)
    async with (
        running_router(redis_url, **router) as rig,
        announced(verifier, rig.registry, digest, vocabulary=vocabulary),
    ):
        with bound("127.0.0.1:0") as listening:
            harness = server(GatewayConfig(router=rig.address, **(gateway or {})))
            serving = asyncio.create_task(harness.serve([listening]))
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            try:
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
                    yield GatewayHarness(url, client, rig, verifier, harness.metrics)
            finally:
                harness.should_exit = True
                await serving


MakeGatewayHarness = Callable[..., AbstractAsyncContextManager[GatewayHarness]]


@pytest.fixture
async def harness(redis_url: str) -> AsyncIterator[GatewayHarness]:
    async with gateway_harness(redis_url) as running:
        yield running


@pytest.fixture
async def chat_harness(redis_url: str, tmp_path: Path) -> AsyncIterator[GatewayHarness]:
    """One whose model has a chat template."""
    shutil.copytree(FOLDER, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    )
    async with gateway_harness(redis_url, models={"target": tmp_path / "chat"}) as running:
        yield running
