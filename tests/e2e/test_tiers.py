"""Tiers of real processes: the target's own text, whichever of them live; a dead tier is skipped, and put back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

import outrider
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.core.session.contract import OFF, Contract
from outrider.fleet.cluster import LocalCluster, Process
from outrider.rpc.channels import open_channel
from outrider.v1 import drafter_pb2, types_pb2
from outrider.v1.drafter_pb2_grpc import DrafterStub
from outrider.wire.tickets import Permit
from tests.e2e.conftest import MODELS
from tests.e2e.mini_router import SIGNERS, decode, detach, trust

pytestmark = pytest.mark.asyncio(loop_scope="session")

WITHIN_S = 30.0


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def tiered() -> AsyncIterator[LocalCluster]:
    """Drafter 0 judges what drafter 1 drafts, and that what drafter 2 finds. All work, however fast the target is."""
    target = MODELS / "target"
    tiers = (
        DrafterConfig(model=MODELS / "mid", dtype="float32", numerics="invariant"),
        DrafterConfig(model=MODELS / "drafter", dtype="float32"),
        DrafterConfig(model=target, drafts="suffix"),
    )
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}, overlap=True, tiers="all", policy="fixed"),
        verifier=[VerifierConfig(model=target, dtype="float32", numerics="invariant")],
        tier={number: [worker] for number, worker in enumerate(tiers)},
    )
    async with LocalCluster(config, forward=lambda name, line: print(name, line)) as running:
        await trust(running)
        yield running


async def described(cluster: LocalCluster, number: int) -> drafter_pb2.DrafterDescription:
    async with open_channel(cluster.processes[f"drafter-{number}"].address) as channel:
        return await DrafterStub(channel).Describe(types_pb2.DescribeRequest())


async def killed(process: Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    await process.stop()


class Asking:
    """Generations one after another, each of which must equal that of plain decoding."""

    def __init__(self, client: outrider.AsyncClient, prompt: str) -> None:
        self._client = client
        self._prompt = prompt
        self._plain: outrider.Generation | None = None

    async def ask(self) -> outrider.Generation:
        terms = {"temperature": 0.8, "seed": 5, "max_tokens": 300, "ignore_eos": True}  # until all tiers are attached
        if self._plain is None:
            self._plain = await self._client.generate(self._prompt, speculation="off", **terms)  # type: ignore[arg-type]
        result = await self._client.generate(self._prompt, **terms)  # type: ignore[arg-type]
        assert (result.token_ids, result.text) == (self._plain.token_ids, self._plain.text)
        return result


async def attach_below(drafter: str, upstream: str, session: str) -> str:
    """Has one drafter draft for another. Return its name."""
    async with open_channel(drafter) as below, open_channel(upstream) as above:
        name = (await DrafterStub(below).Describe(types_pb2.DescribeRequest())).worker_id
        there = (await DrafterStub(above).Describe(types_pb2.DescribeRequest())).worker_id
        signed = SIGNERS[upstream].sign(Permit(session, "", name, there, 1))
        request = drafter_pb2.AttachRequest(session_id=session, epoch=1, upstream=upstream, ticket=signed)
        await DrafterStub(below).Attach(request)
    return name


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.8, 1.0])
async def test_drafts_of_three_tiers_are_accepted_and_the_text_is_the_targets(
    tiered: LocalCluster, tokenizer: Tokenizer, prompts: list[str], temperature: float
) -> None:
    verifier = tiered.processes["verifier-0"].address
    first, second, third = (tiered.processes[f"drafter-{number}"].address for number in range(3))
    accepted = 0
    credited: Counter[str] = Counter()
    lower: list[str] = []
    for number in range(12):  # bites: on a busy machine a lower tier may come late in each of the first sessions
        if number >= 3 and all(credited[name] > 0 for name in lower):
            break
        tokens = tokenizer.encode(prompts[number % 3]).ids
        contract = Contract(seed=number, max_tokens=100, temperature=temperature)
        plain = await decode(verifier, tokens, contract, plan=OFF)
        session = f"tiers-{temperature}-{number}"
        lower = [await attach_below(second, first, session), await attach_below(third, second, session)]
        result = await decode(verifier, tokens, contract, drafters=[first], session=session, pace=0.05)
        for drafter in (first, second, third):
            await detach(drafter, session)
        assert result.tokens == plain.tokens
        accepted += result.accepted
        credited += result.credited
    assert accepted > 30
    assert all(credited[name] > 0 for name in lower), credited


async def test_the_router_puts_each_tier_below_the_one_before(tiered: LocalCluster, prompts: list[str]) -> None:
    async with outrider.AsyncClient(tiered.router_address) as client:
        asking = Asking(client, prompts[0])
        for _ in range(3):
            result = await asking.ask()
            assert len((await client.get_session(result.session_id)).drafters) == 3
    tiers = [await described(tiered, number) for number in range(3)]
    assert [(there.tier, there.drafters) for there in tiers] == [(0, 1), (1, 1), (2, 0)]
    assert all(there.nodes for there in tiers)


async def test_a_session_whose_rule_draws_from_q_has_the_first_tier_alone(
    tiered: LocalCluster, prompts: list[str]
) -> None:
    async with outrider.AsyncClient(tiered.router_address) as client:
        result = await client.generate(prompts[0], max_tokens=60, ignore_eos=True, rule="recursive-rejection")
        assert len((await client.get_session(result.session_id)).drafters) == 1


async def test_a_dead_tier_is_skipped_and_used_again_when_it_returns(tiered: LocalCluster, prompts: list[str]) -> None:
    middle = tiered.processes["drafter-1"]
    async with outrider.AsyncClient(tiered.router_address) as client:
        asking = Asking(client, prompts[1])
        await asking.ask()
        await killed(middle)
        before = (await described(tiered, 2)).nodes
        async with asyncio.timeout(WITHIN_S):
            while True:
                result = await asking.ask()
                names = (await client.get_session(result.session_id)).drafters
                if len(names) == 2 and (await described(tiered, 2)).nodes > before:
                    break
        await middle.start(tiered.redis_url)
        async with asyncio.timeout(WITHIN_S):
            while (await described(tiered, 1)).drafters == 0 or (await described(tiered, 1)).nodes == 0:
                await asking.ask()


async def test_killing_the_first_tier_during_an_answer_keeps_the_text_and_the_other_tiers(
    tiered: LocalCluster, prompts: list[str]
) -> None:
    first = tiered.processes["drafter-0"]
    terms = {"temperature": 1.0, "seed": 3, "max_tokens": 300, "ignore_eos": True}
    async with outrider.AsyncClient(tiered.router_address) as client:
        plain = await client.generate(prompts[2], speculation="off", **terms)  # type: ignore[arg-type]
        tokens: list[int] = []
        async with client.stream(prompts[2], **terms) as stream:  # type: ignore[arg-type]
            async for chunk in stream:
                if not tokens:
                    await killed(first)
                tokens += chunk.token_ids
        assert tuple(tokens) == plain.token_ids
        asking = Asking(client, prompts[2])
        before = (await described(tiered, 1)).nodes
        async with asyncio.timeout(WITHIN_S):
            while (await described(tiered, 1)).nodes == before:
                await asking.ask()
        await first.start(tiered.redis_url)
        async with asyncio.timeout(WITHIN_S):
            while (await described(tiered, 0)).drafters == 0:
                await asking.ask()
