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
class Front:
    """A gateway, and what is behind it."""

    url: str
    client: openai.AsyncOpenAI
    rig: Rig
    verifier: FakeVerifier
    metrics: GatewayMetrics


@asynccontextmanager
async def fronted(
    redis_url: str, verifier: FakeVerifier | None = None, *, gateway: dict[str, Any] | None = None, **router: Any
) -> AsyncIterator[Front]:
    verifier = verifier or FakeVerifier(SCRIPT)
    async with running_router(redis_url, **router) as rig, announced(verifier, rig.registry, MODEL.digest):
        with bound("127.0.0.1:0") as listening:
            front = server(GatewayConfig(router=rig.address, **(gateway or {})))
            serving = asyncio.create_task(front.serve([listening]))
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            try:
                async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
                    yield Front(url, client, rig, verifier, front.metrics)
            finally:
                front.should_exit = True
                await serving


Fronted = Callable[..., AbstractAsyncContextManager[Front]]


@pytest.fixture
async def front(redis_url: str) -> AsyncIterator[Front]:
    async with fronted(redis_url) as running:
        yield running


@pytest.fixture
async def chat_front(redis_url: str, tmp_path: Path) -> AsyncIterator[Front]:
    """One whose model has a chat template."""
    shutil.copytree(FOLDER, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    )
    async with fronted(redis_url, models={"target": tmp_path / "chat"}) as running:
        yield running
