"""Every sampling parameter, token by token: with speculation, without, and by what `transformers` computes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from outrider.cli.verification.compare import TOLERANCE, Verdict, difference
from outrider.cli.verification.reference import Reference
from outrider.client import AsyncClient, FinishReason, Generation
from outrider.core.session.contract import Contract
from outrider.errors import InvalidRequest
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS, cluster_config

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = 96
TERMS: dict[str, dict[str, Any]] = {
    "penalties, greedy": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias and bans": {"temperature": 0.6, "logit_bias": {199: -4.0, 13: 1.5}, "banned_ids": [201, 8]},
    "allowed alone": {"temperature": 1.0, "allowed_ids": list(range(4, 1200))},
    "min-p": {"temperature": 1.2, "min_p": 0.05, "top_k": 400, "top_p": 0.99},
    "nothing but min-tokens": {"temperature": 0.9, "min_tokens": 40},
}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    """Its drafters never rest, however small the target is."""
    config = cluster_config()
    eager = config.model_copy(update={"router": config.router.model_copy(update={"overlap": True})})
    async with LocalCluster(eager, forward=lambda name, line: print(name, line)) as running:
        yield running


@pytest.fixture(scope="module")
def judge() -> Reference:
    return Reference(MODELS / "target")


def same(one: Generation, other: Generation) -> None:
    """Up to a near tie of float32, after which the texts are different ones."""
    parted = difference(one.token_ids, other.token_ids, one.gaps, other.gaps)
    if parted is not None:
        assert parted.judged(TOLERANCE["float32"]) is Verdict.NEAR_TIE
        return
    assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-3)


@pytest.mark.parametrize("name", TERMS)
async def test_text_and_logprobs_are_those_of_plain_decode_and_of_transformers(
    cluster: LocalCluster, prompts: list[str], tokenizer: Tokenizer, judge: Reference, name: str
) -> None:
    prompt = tokenizer.encode(prompts[1]).ids
    terms = {"seed": 12, "max_tokens": TOKENS, **TERMS[name]}
    async with AsyncClient(cluster.router_address) as client:
        plain = await client.generate(prompt, **terms, logprobs=3, ignore_eos=True, speculation="off")
        for _ in range(10):  # bites: each is compared; the drafter may come too late for so small a target
            fast = await client.generate(prompt, **terms, logprobs=3, ignore_eos=True, speculation="fixed")
            same(plain, fast)
            if fast.usage.accepted:
                break
    assert fast.usage.accepted > 0
    parted = judge.difference(prompt, fast.token_ids, Contract(**terms), TOLERANCE["float32"])
    assert parted is None or parted.judged(TOLERANCE["float32"]) is Verdict.NEAR_TIE
    logits = judge.logits(prompt, fast.token_ids).astype(np.float64)
    logs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) - logits.max(1)[:, None]
    for row, token, entry in zip(logs, fast.token_ids, fast.logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[token], abs=2e-3)
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:3], abs=2e-3)


async def test_a_banned_token_is_not_picked_and_a_stop_id_ends_not_before_its_time(
    cluster: LocalCluster, prompts: list[str], tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(prompts[2]).ids
    async with AsyncClient(cluster.router_address) as client:
        free = await client.generate(prompt, seed=4, max_tokens=TOKENS, ignore_eos=True)
        usual = max(set(free.token_ids), key=free.token_ids.count)
        at = free.token_ids.index(usual)
        terms: dict[str, Any] = {"seed": 4, "max_tokens": TOKENS, "ignore_eos": True, "speculation": "fixed"}
        without = await client.generate(prompt, **terms, banned_ids=[usual])
        stopped = await client.generate(prompt, **terms, stop_ids=[usual])
        later = await client.generate(prompt, **terms, stop_ids=[usual], min_tokens=at + 5)
    assert usual not in without.token_ids
    assert (stopped.finish_reason, stopped.token_ids) == (FinishReason.STOP, free.token_ids[: at + 1])
    assert usual not in later.token_ids[: at + 5]
    assert len(later.token_ids) > at + 5


async def test_a_stop_string_ends_alike_wherever_tokens_and_drafts_end(
    cluster: LocalCluster, prompts: list[str]
) -> None:
    async with AsyncClient(cluster.router_address) as client:
        terms: dict[str, Any] = {"seed": 9, "temperature": 0.0, "max_tokens": TOKENS}
        whole = await client.generate(prompts[0], **terms, speculation="off")
        starts = [*range(20, len(whole.text) - 12, 17)][:5]
        assert starts
        for start in starts:
            stop = whole.text[start : start + 7]
            first = whole.text.index(stop)
            plain = await client.generate(prompts[0], **terms, stop=stop, speculation="off")
            fast = await client.generate(prompts[0], **terms, stop=stop, speculation="fixed")
            same(plain, fast)
            assert fast.text == whole.text[:first]
            assert fast.finish_reason is FinishReason.STOP


async def test_several_samples_of_one_prompt_are_the_choices_of_one_seed(
    cluster: LocalCluster, prompts: list[str]
) -> None:
    async with AsyncClient(cluster.router_address) as client:
        samples = await client.samples(prompts[0], 3, seed=6, max_tokens=16)
        alone = [await client.generate(prompts[0], seed=6, choice=choice, max_tokens=16) for choice in range(3)]
        assert [sample.token_ids for sample in samples] == [single.token_ids for single in alone]
        assert len({sample.token_ids for sample in samples}) == 3
        drawn = await client.samples(prompts[0], 2, max_tokens=4)
        assert drawn[0].seed == drawn[1].seed
        with pytest.raises(InvalidRequest, match="choice"):
            await client.samples(prompts[0], 2, choice=1)
        with pytest.raises(InvalidRequest, match="allowed_ids"):
            await client.samples(prompts[0], 2, allowed_ids=[4096], max_tokens=4)
