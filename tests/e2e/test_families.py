"""Targets that the native engine does not know, through real processes: with trees if they can."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.cli.servers.describe import _server
from outrider.client import AsyncClient, SpeculationReason
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS
from tests.engine.families import make_family

pytestmark = pytest.mark.asyncio(loop_scope="session")

TERMS: list[dict[str, Any]] = [
    {"seed": 5, "max_tokens": 60, "ignore_eos": True, "temperature": temperature} for temperature in (0.0, 0.8)
]


def checkpoint(folder: Path, family: str, **changes: Any) -> Path:
    """A random one with the reference models' tokenizer."""
    make_family(folder, family, vocab_size=4096, **changes)
    shutil.copy(MODELS / "target" / "tokenizer.json", folder)
    return folder


def first_layers(target: Path, drafter: Path, kept: int = 2) -> Path:
    """Has the target's later layers add nothing, and makes a drafter that predicts the same tokens without them."""
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        for layer in model.transformer.h[kept:]:
            for last in (layer.attn.c_proj, layer.mlp.c_proj):
                last.weight.zero_()
                last.bias.zero_()
    model.save_pretrained(target)
    model.transformer.h = model.transformer.h[:kept]
    model.config.n_layer = kept
    model.save_pretrained(drafter)
    shutil.copy(target / "tokenizer.json", drafter)
    return drafter


def config(target: Path, drafter: Path, context: int = 100) -> ClusterConfig:
    return ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}, overlap=True),
        verifier=[VerifierConfig(model=target, name="target", dtype="float32", context=context, slots=2)],
        drafter=[DrafterConfig(model=drafter, dtype="float32", slots=2)],
    )


async def test_a_gpt2_drafts_for_a_gpt2_and_changes_nothing(tmp_path: Path, prompts: list[str]) -> None:
    target = checkpoint(tmp_path / "target", "gpt2", n_layer=10, n_positions=400)
    drafter = first_layers(target, tmp_path / "drafter")
    accepted = 0
    async with (
        LocalCluster(config(target, drafter, 400), forward=lambda name, line: print(name, line)) as cluster,
        AsyncClient(cluster.router_address) as client,
    ):
        for terms in TERMS:
            prompt = prompts[0][:60]
            terms = {**terms, "max_tokens": 360}  # the drafter takes a moment to come
            plain = await client.generate(prompt, speculation="off", **terms)
            fast = await client.generate(prompt, speculation="rounds", **terms)  # waits for drafts
            assert fast.token_ids == plain.token_ids
            assert plain.usage.accepted == 0
            accepted += fast.usage.accepted
    assert accepted > 10


async def test_a_mamba_is_served_plainly_beside_a_drafter_with_the_reason(tmp_path: Path, prompts: list[str]) -> None:
    target = checkpoint(tmp_path / "target", "mamba")
    lines: list[str] = []
    async with (
        LocalCluster(config(target, MODELS / "drafter"), forward=lambda name, line: lines.append(line)) as cluster,
        AsyncClient(cluster.router_address) as client,
    ):
        for terms in TERMS:
            # Two at once, then one in a slot that was given up, perhaps while its pass ran.
            asking = [client.generate(prompts[0][:60], speculation="fixed", **terms) for _ in range(2)]
            first, second = await asyncio.gather(*asking)
            async with client.stream(prompts[0][:60], speculation="fixed", **terms) as broken:
                await anext(aiter(broken))
            third = await client.generate(prompts[0][:60], speculation="off", **terms)
            assert first.token_ids == second.token_ids == third.token_ids
            assert len(first.token_ids) == 60
            assert first.usage.accepted == first.usage.verified == 0
            assert first.usage.speculation.reason is SpeculationReason.TREELESS
            assert "its logits over rows of several sessions differ" in first.usage.speculation.detail
        facts = dict(await _server(cluster.processes["verifier-0"].address, None))
        drafter = dict(await _server(cluster.processes["drafter-0"].address, None))
        (misfit,) = await cluster.misfits()
    assert misfit.startswith("drafter-0 drafts for nobody: the target cannot verify trees (")
    assert facts["speculation"].startswith("none: its logits over rows of several sessions differ")
    assert facts["draft streams"] == "0"
    assert drafter["sessions"] == "0 of 2"
    assert drafter["nodes sent"] == "0"
    assert sum("is served without speculation: its logits" in line for line in lines) == 1
