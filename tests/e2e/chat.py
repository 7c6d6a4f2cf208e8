"""A cluster whose target has a chat template of the test's, and its clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

import outrider
from outrider.config import ClusterConfig, DrafterConfig, GatewayConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS


@dataclass(frozen=True)
class Clients:
    sdk: outrider.AsyncClient
    openai: openai.AsyncOpenAI


def make_target(folder: Path, template: str) -> None:
    """The reference target with that template."""
    folder.mkdir()
    for file in (MODELS / "target").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(template)


@asynccontextmanager
async def chat_clients(folder: Path, template: str, **router: Any) -> AsyncIterator[Clients]:
    """`folder`: for the target, which is made here; `router`: further keys of its configuration."""
    make_target(folder, template)
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": folder}, overlap=True, **router),
        verifier=[VerifierConfig(model=folder, dtype="float32")],
        drafter=[DrafterConfig(model=MODELS / "drafter", dtype="float32")],
        gateway=GatewayConfig(listen="127.0.0.1:0"),
    )
    async with (
        LocalCluster(config, forward=lambda name, line: print(name, line)) as cluster,
        outrider.AsyncClient(cluster.router_address) as sdk,
        openai.AsyncOpenAI(
            base_url=f"http://{cluster.processes['gateway'].address}/v1", api_key="unused", max_retries=0
        ) as theirs,
    ):
        yield Clients(sdk, theirs)
