"""A GGUF file and the safetensors of one model are one model: either drafts for the other, and texts are equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers.gguf import write_gguf
from outrider.client import AsyncClient, Options
from outrider.engine.checkpoints.checkpoint import read_tokenizer
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS, cluster_config

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and drafter as files without a tokenizer, and folders of their names beside them that have it."""
    folder = tmp_path_factory.mktemp("gguf")
    for name in ("target", "drafter"):
        write_gguf(MODELS / name, folder / f"{name}.gguf", "float32")
        (folder / name).mkdir()
        (folder / name / "tokenizer.json").symlink_to(MODELS / name / "tokenizer.json")
    return folder


@pytest.mark.parametrize("in_gguf", ["target", "drafter"])
async def test_a_file_drafts_for_a_folder_and_a_folder_for_a_file(
    files: Path, prompts: list[str], reference: list[int], in_gguf: str
) -> None:
    config = cluster_config(drafters=1)
    file = {"model": files / f"{in_gguf}.gguf"}
    verifier, drafter = config.verifier[0], config.drafter[0]
    if in_gguf == "target":
        router = config.router.model_copy(update={"models": {"target": file["model"]}})
        changes = {"router": router, "verifier": [verifier.model_copy(update=file)], "drafter": [drafter]}
    else:
        changes = {"drafter": [drafter.model_copy(update=file)]}
    tokenizer, _ = read_tokenizer(MODELS / "target")
    options: Options = {"max_tokens": 256, "temperature": 0.0, "ignore_eos": True}
    async with (
        LocalCluster(config.model_copy(update=changes), forward=lambda name, line: print(name, line)) as cluster,
        AsyncClient(cluster.router_address) as client,
    ):
        plain = await client.generate(prompts[0], speculation="off", **options)
        assert list(plain.token_ids) == reference
        assert plain.text == tokenizer.decode(reference)
        for _ in range(10):  # the drafter joins when it has read the prompt
            drafted = await client.generate(prompts[0], speculation="rounds", **options)
            assert drafted.token_ids == plain.token_ids
            if drafted.usage.accepted:
                break
    assert drafted.usage.accepted
