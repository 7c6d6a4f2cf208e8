"""A drafter whose tokenizer is another one drafts by text; without being given the target it is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from outrider.client import AsyncClient
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.engine.checkpoints.model_card import ModelCard, weights_digest, write_card
from outrider.errors import ConfigError
from outrider.fleet.cluster import LocalCluster
from tests.drafter.other_tokenizer import make_other
from tests.e2e.conftest import MODELS
from tests.engine.small_checkpoints import keep_ids

pytestmark = pytest.mark.asyncio(loop_scope="session")

TARGET = MODELS / "target"


def config(drafter: DrafterConfig) -> ClusterConfig:
    return ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": TARGET}, overlap=True),
        verifier=[VerifierConfig(model=TARGET, dtype="float32")],
        drafter=[drafter],
    )


async def test_a_drafter_with_another_tokenizer_drafts_by_text(tmp_path: Path, prompts: list[str]) -> None:
    other = make_other(tmp_path / "other")
    await drafts_and_changes_no_text(DrafterConfig(model=other, dtype="float32", target=TARGET), prompts)


async def test_a_drafter_of_a_part_of_the_ids_drafts(tmp_path: Path, prompts: list[str]) -> None:
    reduced = keep_ids(MODELS / "drafter", tmp_path / "reduced", range(2000))
    await drafts_and_changes_no_text(DrafterConfig(model=reduced), prompts)


async def drafts_and_changes_no_text(drafter: DrafterConfig, prompts: list[str]) -> None:
    accepted = 0
    async with (
        LocalCluster(config(drafter), forward=lambda name, line: print(name, line)) as cluster,
        AsyncClient(cluster.router_address) as client,
    ):
        for temperature, prompt in ((0.0, prompts[0]), (0.6, prompts[1]), (0.0, prompts[3])):
            terms = {"seed": 5, "max_tokens": 640, "ignore_eos": True, "temperature": temperature}
            plain = await client.generate(prompt, speculation="off", **terms)
            fast = await client.generate(prompt, speculation="rounds", **terms)  # waits for drafts
            assert fast.token_ids == plain.token_ids
            accepted += fast.usage.accepted
    assert accepted > 20


async def test_a_drafter_with_another_tokenizer_and_no_target_is_refused_at_start(tmp_path: Path) -> None:
    drafter = DrafterConfig(model=make_other(tmp_path / "other"), dtype="float32")
    with pytest.raises(ConfigError, match=r"drafter\.0\.model: .*another tokenizer.*target"):
        async with LocalCluster(config(drafter)):
            pass


async def test_a_drafter_trained_for_another_target_is_refused_at_start(tmp_path: Path) -> None:
    trained = tmp_path / "trained"
    shutil.copytree(MODELS / "drafter", trained)
    digests = {"target_digest": weights_digest(MODELS / "mid"), "tokenizer_digest": ""}
    write_card(trained, ModelCard("drafter", "mid", objective="agreement", tokens=1, seconds=1.0, **digests))
    with pytest.raises(ConfigError, match=r"trained: was trained for mid, whose weights are others than those of "):
        LocalCluster(config(DrafterConfig(model=trained)))
    LocalCluster(config(DrafterConfig(model=trained, any_target=True)))
