"""Without a draft model: in a process of its own, in the verifier, from a corpus; the text stays the target's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from outrider.client import AsyncClient, Generation
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.core.proposers.datastore import write_datastore
from outrider.core.session.contract import PolicyName
from outrider.core.session.digest import tokenizer_digest
from outrider.errors import ConfigError, TokenizerMismatch
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS

pytestmark = pytest.mark.asyncio(loop_scope="session")

TARGET = MODELS / "target"
DIGEST = tokenizer_digest((TARGET / "tokenizer.json").read_bytes())
TOKENS = 160


@asynccontextmanager
async def served(drafter: dict[str, Any] | None = None, **verifier: Any) -> AsyncIterator[AsyncClient]:
    """A client of a cluster whose drafters never rest, however small the target is."""
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": TARGET}, overlap=True),
        verifier=[VerifierConfig(model=TARGET, dtype="float32", **verifier)],
        drafter=[DrafterConfig(model=TARGET, **drafter)] if drafter else [],
    )
    async with (
        LocalCluster(config, forward=lambda name, line: print(name, line)) as cluster,
        AsyncClient(cluster.router_address) as client,
    ):
        yield client


async def both(
    client: AsyncClient, prompt: str, speculation: PolicyName = "fixed", **options: Any
) -> tuple[Generation, Generation]:
    """The answers without speculation and with it."""
    terms: dict[str, Any] = {"seed": 3, "max_tokens": TOKENS, "ignore_eos": True, **options}
    plain = await client.generate(prompt, speculation="off", **terms)
    return plain, await client.generate(prompt, speculation=speculation, **terms)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, prompts: list[str]) -> Path:
    """A store of the texts of the prompts."""
    path = tmp_path_factory.mktemp("corpus") / "held_out.rest"
    texts = [tokenizer.encode(text).ids for text in prompts]
    write_datastore(path, texts, tokenizer_digest=DIGEST, vocabulary=4096, progress=lambda *_: None)
    return path


QUICK = ("drafter", "retrieval"), ("verifier", "suffix")
WAYS = [
    pytest.param(place, way, marks=[] if (place, way) in QUICK else [pytest.mark.long])
    for place in ("drafter", "verifier")
    for way in ("prompt-lookup", "suffix", "retrieval")
]


@pytest.mark.parametrize(("place", "way"), WAYS)
async def test_continuations_found_by_lookup_are_drafted_and_the_text_stays_the_targets(
    prompts: list[str], corpus: Path, place: str, way: str
) -> None:
    settings = {"store": corpus} if way == "retrieval" else {}
    where = {"drafter": {"drafts": way, **settings}} if place == "drafter" else {"lookup": way, **settings}
    speculation: PolicyName = "rounds" if place == "drafter" else "fixed"  # rounds wait for another process's drafts
    accepted = 0
    async with served(**where) as client:
        for temperature, prompt in ((0.0, prompts[0]), (0.7, prompts[1]), (0.0, prompts[2])):
            plain, fast = await both(client, prompt, speculation, temperature=temperature)
            assert fast.token_ids == plain.token_ids
            assert plain.usage.accepted == 0
            accepted += fast.usage.accepted
        lossless, _ = await both(client, prompts[0], rule="target-match", temperature=0.0)
        assert lossless.token_ids == (await both(client, prompts[0], temperature=0.0))[0].token_ids
        drawn = await client.generate(prompts[0], max_tokens=8, rule="recursive-rejection")  # has no use for it
        assert drawn.usage.accepted == 0
    assert accepted > 10


async def test_a_finished_generation_is_drafted_for_the_next_of_its_tenant(prompts: list[str]) -> None:
    async with served(lookup="suffix") as client:
        first = await client.generate(prompts[3], seed=3, max_tokens=TOKENS, ignore_eos=True)
        again = await client.generate(prompts[3], seed=3, max_tokens=TOKENS, ignore_eos=True)
    assert again.token_ids == first.token_ids
    assert again.usage.steps < first.usage.steps / 2


async def test_a_store_that_does_not_fit_is_refused_at_start(tmp_path: Path) -> None:
    path = tmp_path / "foreign.rest"
    write_datastore(path, [[1, 2, 3]], tokenizer_digest=b"x" * 16, vocabulary=4096, progress=lambda *_: None)
    with pytest.raises((ConfigError, TokenizerMismatch), match="its tokenizer is"):
        async with served({"drafts": "retrieval", "store": path}):
            pass
    with pytest.raises(ConfigError, match="outrider index"):
        async with served(lookup="retrieval"):
            pass
    with pytest.raises(ConfigError, match="outrider index"):
        async with served(lookup="suffix", store=tmp_path / "none.rest"):
            pass
