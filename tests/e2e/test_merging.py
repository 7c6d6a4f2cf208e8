"""Several drafters grow one tree; one that adds nothing is let go by what was measured."""

from __future__ import annotations

import pytest

from outrider.cli.cluster import LocalCluster
from outrider.client import AsyncClient
from tests.e2e.conftest import cluster_config

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(("drafters", "left"), [(2, 1)])
async def test_of_two_drafters_that_say_the_same_one_is_released_and_the_text_stays(
    prompts: list[str], drafters: int, left: int
) -> None:
    config = cluster_config(drafters)
    terms = {"overlap": True, "drafters_per_session": drafters}
    config = config.model_copy(
        update={"router": config.router.model_copy(update=terms), "drafter": config.drafter[:drafters]}
    )
    async with (
        LocalCluster(config, forward=lambda name, line: print(name, line)) as cluster,
        AsyncClient(cluster.router_address) as client,
    ):
        plain = await client.generate(prompts[0], seed=4, max_tokens=400, ignore_eos=True, speculation="off")
        merged = await client.generate(prompts[0], seed=4, max_tokens=400, ignore_eos=True, speculation="fixed")
        assert merged.token_ids == plain.token_ids
        assert merged.usage.accepted > 40
        assert len((await client.get_session(merged.session_id)).drafters) == left
