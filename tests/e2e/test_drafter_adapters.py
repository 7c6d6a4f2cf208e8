"""A drafter that has an adapter of its own drafts with it; one that has none drafts as for the model itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

import outrider
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS
from tests.engine.small_adapters import make_adapter

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

TARGET = MODELS / "target"
DEPTH = 4
PROMPT = "def add(a, b):\n    return a + b\n\n\n" * 4  # long enough for its KV to be shared
TERMS: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "seed": 3, "timeout": 60}


@dataclass(frozen=True)
class Adapted:
    client: outrider.AsyncClient
    lines: list[str]

    async def text(self, model: str, **terms: Any) -> outrider.Generation:
        return await self.client.generate(PROMPT, model=model, **TERMS | terms)

    async def logged(self, what: str) -> None:
        async with asyncio.timeout(60):
            while not any(what in line for line in self.lines):
                await asyncio.sleep(0.02)

    async def accepted(self, model: str) -> float:
        """Drafted tokens that a step accepts, of at most DEPTH, of the steps of three answers that had drafts: on a
        busy machine others go without."""
        used = [(await self.text(model, speculation="rounds", depth=DEPTH)).usage for _ in range(3)]
        return sum(usage.accepted for usage in used) / sum(usage.tried_by_depth[0] for usage in used)


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def adapted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Adapted]:
    """The drafter is the target, so with the same adapter it is always right. Of `broken` it has half a file."""
    theirs, own = tmp_path_factory.mktemp("theirs"), tmp_path_factory.mktemp("own")
    for seed, name in enumerate(("both", "alone", "broken")):
        make_adapter(TARGET, theirs / name, seed=seed, deviation=0.1)
    make_adapter(TARGET, own / "both", seed=0, deviation=0.1)
    make_adapter(TARGET, own / "broken", seed=2, deviation=0.1)
    weights = own / "broken" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:9000])
    lines: list[str] = []
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": TARGET}, adapter_loaders=("*",)),
        verifier=[VerifierConfig(model=TARGET, dtype="float32", adapters=theirs)],
        drafter=[DrafterConfig(model=TARGET, dtype="float32", adapters=own)],
    )
    async with (
        LocalCluster(config, forward=lambda name, line: lines.append(f"{name}: {line}")) as cluster,
        outrider.AsyncClient(cluster.router_address) as client,
    ):
        for name in ("both", "alone", "broken"):
            await client.load_adapter(name, name)
        made = Adapted(client, lines)
        await made.text("both", speculation="rounds")  # has the drafter load it
        await made.logged("adapter both is drafted for with")
        yield made


async def test_a_drafter_uses_its_own_adapter_as_soon_as_it_is_loaded(adapted: Adapted) -> None:
    plain = await adapted.text("both", speculation="off")
    assert await adapted.accepted("both") > 0.85 * DEPTH
    assert (await adapted.text("both", speculation="rounds")).token_ids == plain.token_ids


async def test_sessions_with_and_without_an_adapter_are_drafted_for_together(adapted: Adapted) -> None:
    plain = await adapted.text("target", speculation="off")
    for _ in range(2):  # the same text under both, one after the other: no KV of one serves the other
        assert await adapted.accepted("both") > 0.85 * DEPTH
        assert await adapted.accepted("target") > 0.85 * DEPTH
    assert (await adapted.text("target", speculation="rounds")).token_ids == plain.token_ids


@pytest.mark.parametrize("name", ["alone", "broken"])
async def test_a_session_whose_adapter_the_drafter_lacks_is_drafted_for_without_it(adapted: Adapted, name: str) -> None:
    plain = await adapted.text(name, speculation="off")
    drafted = await adapted.text(name, speculation="rounds", depth=DEPTH)
    assert drafted.token_ids == plain.token_ids
    assert 0 < await adapted.accepted(name) < 0.6 * DEPTH
    if name == "broken":
        await adapted.logged(f"adapter {name} are drafted for without it")
    warned = [line for line in adapted.lines if f"adapter {name} are drafted for without it" in line]
    assert len(warned) == (name == "broken")
