"""Looking ahead in the verifier, the target's own guesses are drafted, and the text stays the target's."""

from __future__ import annotations

import pytest

from tests.e2e.test_lookups import both, served

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("numerics", ["fast", pytest.param("invariant", marks=pytest.mark.long)])
async def test_lookahead_guesses_are_drafted_and_the_text_stays_the_targets(prompts: list[str], numerics: str) -> None:
    async with served(lookup="lookahead", numerics=numerics) as client:
        for temperature, prompt in ((0.0, prompts[0]), (0.8, prompts[1]), (0.8, prompts[2])):
            plain, ahead = await both(client, prompt, temperature=temperature)
            assert ahead.token_ids == plain.token_ids
            assert plain.usage.accepted == 0 < ahead.usage.accepted
            assert ahead.usage.steps + ahead.usage.accepted == plain.usage.steps
        drawn = await client.generate(prompts[0], max_tokens=8, rule="recursive-rejection")  # has no use for it
        assert drawn.usage.accepted == 0


async def test_a_drafter_s_nodes_and_guesses_make_one_tree(prompts: list[str]) -> None:
    async with served({"dtype": "float32"}, lookup="lookahead") as client:
        plain, ahead = await both(client, prompts[0], temperature=0.8)
    assert ahead.token_ids == plain.token_ids
    assert ahead.usage.accepted > 10
