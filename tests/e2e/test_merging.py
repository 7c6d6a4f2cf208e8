"""Several drafters grow one tree; one that adds nothing is let go by what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.client import AsyncClient, Options
from outrider.config import DrafterConfig
from outrider.core.proposers.datastore import write_datastore
from outrider.core.session.digest import tokenizer_digest
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS, cluster_config

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_drafter_that_never_helps_is_released_and_the_text_stays(tmp_path: Path, prompts: list[str]) -> None:
    store = tmp_path / "foreign.rest"  # this store has nothing of the text
    digest = tokenizer_digest((MODELS / "target" / "tokenizer.json").read_bytes())
    write_datastore(store, [[4000, 4001, 4002]], tokenizer_digest=digest, vocabulary=4096, progress=lambda *_: None)
    config = cluster_config(drafters=1)
    useless = DrafterConfig(model=MODELS / "target", drafts="retrieval", store=store)
    terms = {"policy": "rounds", "depth": 4, "drafters_per_session": 2}  # waits for drafts, however busy the machine
    config = config.model_copy(
        update={
            "router": config.router.model_copy(update=terms),
            "drafter": [config.drafter[0], useless],
        }
    )
    lines: list[str] = []
    async with (
        LocalCluster(config, forward=lambda name, line: lines.append(line)) as cluster,
        AsyncClient(cluster.router_address) as client,
    ):
        drafters: tuple[str, ...] = ()
        for seed in range(4, 9):  # bites: it takes 64 steps with both, and on a busy machine they join late
            options: Options = {"seed": seed, "max_tokens": 880, "ignore_eos": True}
            plain = await client.generate(prompts[0], speculation="off", **options)
            merged = await client.generate(prompts[0], speculation="rounds", **options)
            assert merged.token_ids == plain.token_ids
            drafters = (await client.get_session(merged.session_id)).drafters
            if len(drafters) == 1:
                break
        assert len(drafters) == 1
        assert merged.usage.accepted > 0
    assert any("let go by session" in line and line.endswith("others draft the same") for line in lines)
