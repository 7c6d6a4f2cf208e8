"""What `outrider verify` does, on a real cluster that is right, and on one that lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import pytest

from outrider.cli.verification.cases import VerifyCase, VerifyPrompt, compare, plan, read_prompts
from outrider.cli.verification.compare import TOLERANCE, Verdict
from outrider.cli.verification.reference import Reference
from outrider.cli.verification.verify import last_line
from outrider.client import AsyncClient, Generation
from outrider.client._wire import Options
from outrider.errors import TokenizerMismatch
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS
from tests.e2e.tiny_models import make_tiny

pytestmark = pytest.mark.asyncio(loop_scope="session")

LIE_AT = 5  # token of the answer


class Liar(AsyncClient):
    """Changes one token of every answer that was made in one of the given ways."""

    def __init__(self, address: str, *ways: str) -> None:
        super().__init__(address)
        self._ways = ways

    async def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        honest = await super().generate(prompt, timeout=timeout, **options)
        if options.get("speculation") not in self._ways:
            return honest
        tokens = list(honest.token_ids)
        tokens[LIE_AT] = (tokens[LIE_AT] + 1) % 4096
        return replace(honest, token_ids=tuple(tokens))


class Warmer(AsyncClient):
    """Draws from a law that is a little flatter than the target's."""

    async def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        options["temperature"] = 1.3 * options["temperature"]
        return await super().generate(prompt, timeout=timeout, **options)


@pytest.fixture(scope="module")
def chosen(prompts: list[str]) -> list[VerifyPrompt]:
    return read_prompts(MODELS / "target", None, prompts[:1], 1)


@pytest.fixture(scope="module")
def judge() -> Reference:
    return Reference(MODELS / "target")


async def cases(client: AsyncClient, chosen: list[VerifyPrompt], judge: Reference | None) -> list[VerifyCase]:
    work = plan(chosen, [0.0, 0.8], 1)
    tolerance = TOLERANCE["float32"]
    return [case async for case in compare(client, work, judge, tolerance=tolerance, max_tokens=24, timeout=60)]


async def test_a_cluster_that_is_right_has_no_bugs(
    cluster: LocalCluster, chosen: list[VerifyPrompt], judge: Reference
) -> None:
    async with AsyncClient(cluster.router_address) as client:
        found = await cases(client, chosen, judge)
    assert last_line(found) == (
        "verify: texts=2 tokens=96 identical=2 near_ties=0 bugs=0 reference_near_ties=0 reference_bugs=0"
    )


async def test_a_wrong_speculative_token_shows_in_both_comparisons(
    cluster: LocalCluster, chosen: list[VerifyPrompt], judge: Reference
) -> None:
    async with Liar(cluster.router_address, "fixed") as client:
        found = await cases(client, chosen, judge)
    for case in found:
        assert (case.verdict, case.reference_verdict) == (Verdict.BUG, Verdict.BUG)
        assert case.difference is not None
        assert case.difference.position == LIE_AT
        assert case.difference.gap == min(case.plain.gaps[LIE_AT], case.speculative.gaps[LIE_AT])
        assert case.reference_difference is not None
        assert case.reference_difference.position == LIE_AT
        assert case.reference_difference.gap > 0.9 * case.plain.gaps[LIE_AT]  # it is over the lie, not the runner-up


async def test_a_wrong_token_in_both_answers_is_found_by_the_reference_alone(
    cluster: LocalCluster, chosen: list[VerifyPrompt], judge: Reference
) -> None:
    async with Liar(cluster.router_address, "off", "fixed") as client:
        found = await cases(client, chosen, judge)
        assert [(case.verdict, case.reference_verdict) for case in found] == [(Verdict.IDENTICAL, Verdict.BUG)] * 2
        assert [case.verdict for case in await cases(client, chosen, None)] == [Verdict.IDENTICAL] * 2


async def draws(client: AsyncClient, chosen: list[VerifyPrompt], judge: Reference) -> list[VerifyCase]:
    work = plan(chosen, [0.0, 1.0], 12)
    terms: Any = {"tolerance": TOLERANCE["float32"], "rule": "recursive-rejection", "timeout": 60}
    return [case async for case in compare(client, work, judge, **terms)]


async def test_a_rule_that_draws_from_q_gives_equal_greedy_texts_and_keeps_the_distribution(
    cluster: LocalCluster, chosen: list[VerifyPrompt], judge: Reference
) -> None:
    async with AsyncClient(cluster.router_address) as client:
        found = await draws(client, chosen, judge)
    assert found[0].verdict is Verdict.IDENTICAL
    assert last_line(found).endswith("bugs=0 reference_near_ties=0 reference_bugs=0 drawn=768 law=kept")


async def test_draws_that_do_not_follow_the_distribution_are_found(
    cluster: LocalCluster, chosen: list[VerifyPrompt], judge: Reference
) -> None:
    async with Warmer(cluster.router_address) as client:
        found = await draws(client, chosen, judge)
    assert last_line(found).endswith("bugs=0 reference_near_ties=0 reference_bugs=0 drawn=768 law=broken")


async def test_the_tokens_of_another_tokenizer_are_refused(cluster: LocalCluster, tmp_path: Path) -> None:
    other = read_prompts(make_tiny(tmp_path, layers=1, width=16), None, ["w1 w2"], 1)
    async with AsyncClient(cluster.router_address) as client:
        with pytest.raises(TokenizerMismatch, match="tokenizer_digest"):
            await cases(client, other, None)
