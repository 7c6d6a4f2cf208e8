"""Log-probabilities of prompts are those of `transformers`, whatever was cached, and change no answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from tokenizers import Tokenizer

from outrider.cli.verification.reference import Reference
from outrider.client import AsyncClient, LogprobRows
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS, cluster_config

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = 1e-4
TERMS = {"seed": 3, "max_tokens": 12, "ignore_eos": True}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def client() -> AsyncIterator[AsyncClient]:
    async with (
        LocalCluster(cluster_config(), forward=lambda name, line: print(name, line)) as cluster,
        AsyncClient(cluster.router_address) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def judge() -> Reference:
    return Reference(MODELS / "target")


@pytest.fixture(scope="module")
def text(prompts: list[str], tokenizer: Tokenizer) -> list[int]:
    """Longer than several chunks of a prompt."""
    return [token for prompt in prompts for token in tokenizer.encode(prompt).ids][:900]


def expected(judge: Reference, tokens: Sequence[int]) -> NDArray[np.float64]:
    """The log-probabilities of all tokens after each of the text's but its last: [tokens - 1, vocabulary]."""
    logits = judge.logits(tokens[:1], tokens[1:]).astype(np.float64)
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def check(rows: LogprobRows, tokens: Sequence[int], logs: NDArray[np.float64], alternatives: int) -> None:
    assert [entry.id for entry in rows] == list(tokens)
    first, *others = rows
    assert math.isnan(first.logprob)
    assert (first.rank, first.top) == (0, ())
    for entry, row in zip(others, logs, strict=True):
        assert entry.logprob == pytest.approx(row[entry.id], abs=TOLERANCE)
        best = np.sort(row)[::-1][:alternatives]
        assert [value for _, value in entry.top] == pytest.approx(best, abs=TOLERANCE)
        assert [row[id_] for id_, _ in entry.top] == pytest.approx(best, abs=TOLERANCE)
        likelier = int((row > row[entry.id] + TOLERANCE).sum()), int((row > row[entry.id] - TOLERANCE).sum())
        assert likelier[0] < entry.rank <= likelier[1] + 1


async def test_they_are_those_of_transformers_and_change_no_answer(
    client: AsyncClient, judge: Reference, text: list[int]
) -> None:
    logs = expected(judge, text)
    plain = await client.generate(text, **TERMS)
    for alternatives in (3, 0):  # all of the prompt is cached by now
        scored = await client.generate(text, **TERMS, prompt_logprobs=alternatives, speculation="fixed")
        check(scored.prompt_logprobs, text, logs, alternatives)
        assert (scored.token_ids, scored.text) == (plain.token_ids, plain.text)
        assert scored.cached_tokens == 0
    again = await client.generate(text, **TERMS)
    assert again.cached_tokens == len(text) - 1
    assert again.token_ids == plain.token_ids
    assert not again.prompt_logprobs


async def test_they_are_bit_for_bit_the_same_beside_others_and_of_prompts_that_begin_alike(
    client: AsyncClient, text: list[int]
) -> None:
    halves = text[:300], [*text[:200], *text[250:400]]
    alone = [(await client.generate(half, **TERMS, prompt_logprobs=2)).prompt_logprobs for half in halves]
    many = [client.generate(half, **TERMS, prompt_logprobs=2) for half in halves * 4]
    for at, found in enumerate(await asyncio.gather(*many)):
        assert found.prompt_logprobs.rows == alone[at % 2].rows
    assert alone[0].rows[:200] == alone[1].rows[:200]


async def test_those_of_a_turn_are_of_the_whole_session(client: AsyncClient, judge: Reference, text: list[int]) -> None:
    first = await client.generate(text[:40], **TERMS)
    second = await client.generate(text[40:60], **TERMS, session=first.session_id, prompt_logprobs=1)
    whole = [*text[:40], *first.token_ids, *text[40:60]]
    check(second.prompt_logprobs, whole, expected(judge, whole), 1)


async def test_a_prompt_of_one_token_has_none(client: AsyncClient, text: list[int]) -> None:
    found = await client.generate(text[:1], **TERMS, prompt_logprobs=2)
    assert [entry.rank for entry in found.prompt_logprobs] == [0]
    assert len(found.token_ids) == TERMS["max_tokens"]


async def test_a_stream_has_them_before_the_answer(client: AsyncClient, text: list[int]) -> None:
    chunks = [chunk async for chunk in client.stream(text, **TERMS, prompt_logprobs=1, logprobs=1)]
    prompt = [chunk for chunk in chunks if chunk.prompt_logprobs]
    assert chunks[: len(prompt)] == prompt
    assert not any(chunk.text or chunk.token_ids for chunk in prompt)
    assert sum(len(chunk.prompt_logprobs) for chunk in prompt) == len(text)
    assert sum(len(chunk.logprobs) for chunk in chunks) == TERMS["max_tokens"]
