"""A GGUF file and the safetensors of one model are one model: either drafts for the other, and texts are equal."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from bench.peers.gguf import write_gguf
from outrider.client import AsyncClient
from outrider.config import DrafterConfig, RouterConfig, VerifierConfig
from outrider.engine.checkpoints.checkpoint import read_tokenizer
from outrider.fleet.cluster import LocalCluster
from outrider.fleet.process import Process
from outrider.store.redis.embedded import EmbeddedRedis
from tests.e2e.conftest import MODELS, cluster_config
from tests.engine.gguf.real_files import SMOLLM2, real_file

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
    options: dict[str, Any] = {"max_tokens": 256, "temperature": 0.0, "ignore_eos": True}
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


@pytest.mark.extended
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
async def test_a_real_files_text_is_the_same_with_drafts_and_when_processes_die(kv_dtype: str) -> None:
    """Two verifiers of a model that other people quantized, with the same file as a drafter."""
    file = real_file(SMOLLM2)
    terms: dict[str, Any] = {"seed": 7, "temperature": 1.0, "max_tokens": 200, "ignore_eos": True, "timeout": 100}
    with EmbeddedRedis() as redis:
        own: dict[str, Any] = {"model": file, "threads": 1, "kv_dtype": kv_dtype}
        routing = RouterConfig(listen="127.0.0.1:0", models={"smol": file})
        verifying = VerifierConfig(name="smol", slots=2, **own)
        verifiers = [Process("verifier", f"verifier-{number}", verifying, print) for number in range(3)]
        drafter = Process("drafter", "drafter-0", DrafterConfig(slots=2, **own), print)
        router = Process("router", "router", routing, print)
        try:
            await asyncio.gather(*(each.start(redis.url) for each in (router, drafter, verifiers[0])))
            async with AsyncClient(router.address) as client:
                plain = await client.generate("Once upon a time", speculation="off", **terms)
                stream = client.stream("Once upon a time", speculation="rounds", **terms)
                text, dying = "", [verifiers[0], verifiers[1]]
                async for chunk in stream:
                    text += chunk.text
                    if dying and len(text) > len(plain.text) // (len(dying) + 1):
                        await verifiers[3 - len(dying)].start(redis.url)
                        os.kill(dying.pop(0).pid, signal.SIGKILL)
            assert text == plain.text
            assert stream.result.token_ids == plain.token_ids
            assert stream.result.usage.accepted > 20
            assert not dying
        finally:
            await asyncio.gather(*(each.stop() for each in (router, drafter, *verifiers) if each.address))
