"""Families with other parts than Llama's as targets and drafters: drafts are accepted, and change no text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from outrider.client import AsyncClient
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from tests.e2e.test_families import checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="session")

TERMS: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "seed": 3}


@pytest.mark.parametrize("family", ["qwen3-5", "qwen3-5-moe", "gemma3", "qwen3-moe"])
async def test_drafts_of_a_family_for_itself(family: str, tmp_path: Path, prompts: list[str]) -> None:
    """The drafter is the target itself in another type, so that most drafts are accepted and some are not."""
    folder = checkpoint(tmp_path / family, family, max_position_embeddings=512)
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": folder}),
        verifier=[VerifierConfig(model=folder, dtype="float32", slots=4, threads=1)],
        drafter=[DrafterConfig(model=folder, dtype="int8", threads=1)],
    )
    async with LocalCluster(config) as running, AsyncClient(running.router_address) as client:

        async def ask(prompt: str, temperature: float) -> int:
            plain = await client.generate(prompt, speculation="off", temperature=temperature, **TERMS)
            fast = await client.generate(prompt, speculation="rounds", temperature=temperature, **TERMS)
            assert fast.token_ids == plain.token_ids
            return fast.usage.accepted

        for temperature in (0.0, 0.8):
            for _ in range(10):  # the first answers may end before a drafter has joined
                if any(await asyncio.gather(*(ask(it, temperature) for it in prompts[:3]))):
                    break
            else:
                pytest.fail(f"no draft was accepted at temperature {temperature}")
