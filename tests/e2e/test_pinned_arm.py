"""A verifier whose way of working is pinned."""

from __future__ import annotations

import pytest

import outrider
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.extended]

TARGET = MODELS / "target"
PROMPTS = ("def main():", "import os\n", "class Point:", "for index in range(10):", "# Return the sum of all")


async def test_each_verifier_keeps_to_the_arm_that_its_configuration_pins() -> None:
    arms = ("rest", "turns", "ahead")
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models=dict.fromkeys(arms, TARGET)),
        verifier=[VerifierConfig(model=TARGET, name=arm, arm=arm, dtype="float32") for arm in arms],
        drafter=[DrafterConfig(model=MODELS / "drafter", dtype="float32")],
    )
    drafted, texts = dict.fromkeys(arms, 0), set()
    async with LocalCluster(config) as local, outrider.AsyncClient(local.router_address) as client:
        for arm in arms:
            for prompt in PROMPTS:  # how much is drafted for one answer depends on what else the machine does
                result = await client.generate(prompt, model=arm, temperature=0.0, max_tokens=300, ignore_eos=True)
                drafted[arm] += result.usage.accepted
                texts.add((prompt, result.text))
    assert len(texts) == len(PROMPTS)
    assert drafted["rest"] == 0
    assert drafted["turns"] > 100
    assert drafted["ahead"] > 0
