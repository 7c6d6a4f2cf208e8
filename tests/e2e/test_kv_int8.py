"""With KV in int8 a text is the one that the engine generates alone, whoever drafts and whose prefix it shares."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from outrider.client import AsyncClient
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS, cluster_config
from tests.engine.taught import greedy

pytestmark = pytest.mark.asyncio(loop_scope="session")

TARGET = MODELS / "target"
TOKENS = 96


@pytest.mark.extended
async def test_drafted_texts_and_those_behind_a_shared_prefix_are_the_engines(
    tokenizer: Tokenizer, prompts: list[str]
) -> None:
    config = cluster_config(drafters=1)
    coded = {"kv_dtype": "int8"}
    changes = {
        "verifier": [it.model_copy(update=coded) for it in config.verifier],
        "drafter": [it.model_copy(update=coded) for it in config.drafter],
    }
    first = tokenizer.encode(prompts[0]).ids
    text = greedy(TARGET, first, TOKENS, kv_dtype="int8")
    fork = text[: len(first) + TOKENS // 2] + tokenizer.encode(prompts[1]).ids
    forked = greedy(TARGET, fork, TOKENS, kv_dtype="int8")
    options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    async with (
        LocalCluster(config.model_copy(update=changes), forward=lambda name, line: print(name, line)) as cluster,
        AsyncClient(cluster.router_address) as client,
    ):
        plain = await client.generate(first, speculation="off", **options)
        assert [*first, *plain.token_ids] == text
        for _ in range(10):  # the drafter joins when it has read the prompt
            drafted = await client.generate(first, speculation="rounds", **options)
            assert drafted.token_ids == plain.token_ids
            if drafted.usage.accepted:
                break
        assert drafted.usage.accepted
        for speculation in ("off", "rounds"):
            behind = await client.generate(fork, speculation=speculation, **options)
            assert behind.cached_tokens >= len(first)
            assert [*fork, *behind.token_ids] == forked
