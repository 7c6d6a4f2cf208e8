"""Heads on the target in a cluster of processes: with a drafter they make one tree, and the text is the target's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.e2e.test_lookups import TARGET, TOKENS, both, served
from tests.engine.taught import greedy, taught_heads

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_heads_draft_beside_a_drafter_and_the_text_is_the_target_s(
    tokenizer: Tokenizer, prompts: list[str], tmp_path: Path
) -> None:
    taught_heads("eagle", TARGET, tmp_path, greedy(TARGET, tokenizer.encode(prompts[0]).ids, TOKENS))
    async with served({"dtype": "float32"}, heads=tmp_path, lookup="suffix") as client:
        for temperature, prompt in ((0.0, prompts[0]), (1.0, prompts[0]), (0.8, prompts[2])):
            plain, fast = await both(client, prompt, temperature=temperature)
            assert fast.token_ids == plain.token_ids
            assert plain.usage.accepted == 0 < fast.usage.accepted
