"""In fp32, through real processes, the text is the target's own whatever drafts."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from os import kill

import pytest
from tokenizers import Tokenizer

from outrider.core.session.contract import OFF, Contract, Plan, PlanOverlap
from outrider.fleet.cluster import LocalCluster
from tests.e2e.adversary import Adversary
from tests.e2e.conftest import cluster_config
from tests.e2e.mini_router import SPECULATE, Answer, decode, trust

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = 256
NEAR_TIE = 1e-3  # fp32: a lead of log p + g below it may fall either way
TERMS = [
    Contract(seed=0, max_tokens=TOKENS, temperature=0.0),
    Contract(seed=7, max_tokens=TOKENS, temperature=0.8, top_k=200, top_p=0.98),
    Contract(seed=8, max_tokens=TOKENS, temperature=1.0),
]
# Steps wait for drafts, however busy the machine is.
ROUNDS = Plan(version=1, depth=4, width=4, nodes=16, wait_us=2_000_000, overlap=PlanOverlap.ROUNDS)
Run = Callable[[Contract], Awaitable[Answer]]
_plain: dict[Contract, Answer] = {}


@pytest.fixture(scope="session")
def prompt(tokenizer: Tokenizer, prompts: list[str]) -> list[int]:
    return tokenizer.encode(prompts[0]).ids


async def plain_answer(cluster: LocalCluster, prompt: list[int], contract: Contract) -> Answer:
    """Plain decode, once for each contract."""
    if contract not in _plain:
        _plain[contract] = await decode(verifier_of(cluster), prompt, contract, plan=OFF)
    return _plain[contract]


def verifier_of(cluster: LocalCluster) -> str:
    return cluster.processes["verifier-0"].address


def drafter_of(cluster: LocalCluster, number: int) -> str:
    return cluster.processes[f"drafter-{number}"].address


async def test_plain_greedy_decode_is_that_of_transformers(
    cluster: LocalCluster, prompt: list[int], reference: list[int]
) -> None:
    answer = await plain_answer(cluster, prompt, TERMS[0])
    assert len(answer.tokens) == TOKENS
    assert answer.tokens == reference
    assert answer.accepted == 0


async def test_plain_decode_is_repeatable_and_the_seed_and_choice_matter(
    cluster: LocalCluster, prompt: list[int]
) -> None:
    first = await plain_answer(cluster, prompt, TERMS[1])
    again = await decode(verifier_of(cluster), prompt, TERMS[1], plan=OFF)
    assert first.tokens == again.tokens
    short = Contract(seed=7, max_tokens=32, temperature=0.8)
    other = Contract(seed=7, max_tokens=32, temperature=0.8, choice=1)
    texts = [(await decode(verifier_of(cluster), prompt, terms, plan=OFF)).tokens for terms in (short, other)]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("contract", TERMS, ids=["greedy", "filtered", "sampled"])
async def test_the_drafter_changes_the_speed_and_not_the_text(
    cluster: LocalCluster, prompt: list[int], contract: Contract
) -> None:
    plain = await plain_answer(cluster, prompt, contract)
    drafter = [drafter_of(cluster, 0)]
    answer = await decode(verifier_of(cluster), prompt, contract, plan=ROUNDS, drafters=drafter, pace=0.01)
    assert answer.tokens == plain.tokens
    assert answer.accepted > TOKENS // 4  # it did draft
    assert len(answer.reports) == TOKENS - answer.accepted  # each step commits what it accepted and one more


@pytest.mark.parametrize("contract", TERMS, ids=["greedy", "filtered", "sampled"])
async def test_a_drafter_equal_to_the_target_has_everything_accepted(
    cluster: LocalCluster, prompt: list[int], contract: Contract
) -> None:
    plain = await plain_answer(cluster, prompt, contract)
    chain = replace(ROUNDS, depth=8, width=1, nodes=8)
    twin = [drafter_of(cluster, 2)]
    answer = await decode(verifier_of(cluster), prompt, contract, plan=chain, drafters=twin, pace=0.01)
    assert answer.tokens == plain.tokens
    assert answer.accepted > TOKENS // 2
    position = 0
    for report in answer.reports:
        position += report.accepted
        if report.accepted < report.verified_depth and position < TOKENS:
            assert answer.gaps[position] < NEAR_TIE  # of the first token that the chain missed
        position += 1


@pytest.mark.parametrize("contract", TERMS, ids=["greedy", "filtered", "sampled"])
async def test_an_adversary_with_random_trees_changes_nothing(
    cluster: LocalCluster, prompt: list[int], contract: Contract
) -> None:
    plain = await plain_answer(cluster, prompt, contract)
    session = f"adverse-{contract.seed}"
    adversary = Adversary(verifier_of(cluster), session, seed=contract.seed)
    drafting = asyncio.create_task(adversary.run())
    answer = await decode(verifier_of(cluster), prompt, contract, session=session, pace=0.004)
    async with asyncio.timeout(10):
        await drafting
    assert answer.tokens == plain.tokens
    assert adversary.sent > 100
    assert sum(report.verified for report in answer.reports) > 20


@pytest.mark.parametrize("contract", TERMS, ids=["greedy", "filtered", "sampled"])
async def test_two_drafters_of_one_session_change_nothing(
    cluster: LocalCluster, prompt: list[int], contract: Contract
) -> None:
    plain = await plain_answer(cluster, prompt, contract)
    both = [drafter_of(cluster, 0), drafter_of(cluster, 2)]
    answer = await decode(verifier_of(cluster), prompt, contract, drafters=both, pace=0.004)
    assert answer.tokens == plain.tokens
    assert max(report.drafters for report in answer.reports) == 2


@pytest.mark.parametrize("contract", TERMS, ids=["greedy", "filtered", "sampled"])
async def test_gamma_changed_in_mid_stream_changes_nothing(
    cluster: LocalCluster, prompt: list[int], contract: Contract
) -> None:
    plain = await plain_answer(cluster, prompt, contract)
    depths = [1, 12, 0, 3, 8]

    async def each(answer: Answer) -> Plan | None:
        steps = len(answer.reports)
        depth, width, nodes = depths[steps % 5], 1 + steps % 4, 4 + steps % 13
        return Plan(1 + steps, depth=depth, width=width, nodes=nodes, overlap=PlanOverlap.ALWAYS) if steps else None

    answer = await decode(
        verifier_of(cluster), prompt, contract, drafters=[drafter_of(cluster, 0)], each=each, pace=0.02
    )
    assert answer.tokens == plain.tokens
    assert len({report.plan_version for report in answer.reports}) > 10
    assert answer.accepted > 0


@pytest.mark.parametrize("contract", TERMS, ids=["greedy", "filtered", "sampled"])
async def test_concurrent_sessions_generate_the_text_of_each_session_alone(
    cluster: LocalCluster, prompt: list[int], contract: Contract
) -> None:
    plain = await plain_answer(cluster, prompt, contract)
    drafters = [drafter_of(cluster, 0), drafter_of(cluster, 1)]
    answers = await asyncio.gather(
        *(
            decode(verifier_of(cluster), prompt, contract, drafters=[drafters[number % 2]] if number % 3 else [])
            for number in range(6)
        )
    )
    assert all(answer.tokens == plain.tokens for answer in answers)


async def test_a_drafter_killed_in_mid_stream_costs_only_speed(cluster: LocalCluster, prompt: list[int]) -> None:
    async with LocalCluster(cluster_config(drafters=1)) as doomed:
        await trust(doomed)
        victim = doomed.processes["drafter-0"]
        for number, contract in enumerate(TERMS):
            plain = await plain_answer(cluster, prompt, contract)

            async def each(answer: Answer, number: int = number) -> Plan | None:
                if number == 0 and victim.status is None and answer.accepted >= 10:
                    kill(victim.pid, signal.SIGKILL)
                    await victim.wait()
                return None

            drafters = [victim.address] if number == 0 else [drafter_of(doomed, 1)]
            answer = await decode(verifier_of(doomed), prompt, contract, drafters=drafters, each=each, pace=0.02)
            assert answer.tokens == plain.tokens
            if number == 0:
                assert answer.reports[-1].drafters == 0
                assert answer.accepted >= 10


async def test_a_longer_prompt_prefilled_in_chunks_changes_nothing(
    cluster: LocalCluster, tokenizer: Tokenizer, prompts: list[str]
) -> None:
    ids = tokenizer.encode("\n".join(prompts)).ids[:600]
    contract = Contract(seed=3, max_tokens=48, temperature=0.7)
    plain = await decode(verifier_of(cluster), ids, contract, plan=OFF)
    answer = await decode(verifier_of(cluster), ids, contract, drafters=[drafter_of(cluster, 0)], plan=SPECULATE)
    assert answer.tokens == plain.tokens
