"""A drafter that was just trained drafts for its target in a cluster, and the answers are those without it."""

from __future__ import annotations

from pathlib import Path

from outrider.client import AsyncClient
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.fleet.cluster import LocalCluster
from tests.training.family import recipe, train

TRIES = 20  # texts at the most: on a busy machine drafts come late


async def test_a_cluster_drafts_with_a_freshly_trained_drafter(target: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    train(recipe(target, drafter, layers=(0, 1, 2), tokens=4 * 128, learning_rate=1e-5))  # as good as the target itself
    cluster = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}),
        verifier=[VerifierConfig(model=target, dtype="float32")],
        drafter=[DrafterConfig(model=drafter, dtype="float32")],
    )
    verified = accepted = 0
    async with (
        LocalCluster(cluster, forward=lambda name, line: print(name, line)) as running,
        AsyncClient(running.router_address) as client,
    ):
        for seed in range(TRIES):
            terms = {"seed": seed, "max_tokens": 80, "ignore_eos": True, "temperature": 1.0}
            plain = await client.generate("A drafter", speculation="off", **terms)
            fast = await client.generate("A drafter", speculation="rounds", depth=4, **terms)
            assert fast.token_ids == plain.token_ids
            verified += fast.usage.verified
            accepted += fast.usage.accepted
            if accepted > 20:
                break
    assert accepted > 20
    assert accepted > 0.8 * verified
