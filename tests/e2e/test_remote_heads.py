"""EAGLE heads in a drafter of their own draft from the features that the verifier sends; the text is the target's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from drafter_svc.loading import check_settings
from drafter_svc.loading import load_part as load_drafter_part
from outrider.client import AsyncClient, SpeculationReason
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.core.session.contract import OFF, Contract, Plan, PlanOverlap
from outrider.errors import ConfigError
from outrider.fleet.cluster import LocalCluster
from outrider.fleet.process import Process
from tests.e2e.conftest import MODELS
from tests.e2e.mini_router import Answer, attach, decode, trust
from tests.e2e.test_lookups import TARGET, TOKENS, both, served
from tests.engine.taught import DEPTH, greedy, random_heads, taught_heads
from verifier_svc.server import load_part as load_verifier_part

pytestmark = pytest.mark.asyncio(loop_scope="session")

PLAIN = DrafterConfig(model=MODELS / "drafter", dtype="float32")
ROUNDS = Plan(version=1, depth=DEPTH, width=4, nodes=16, wait_us=2_000_000, overlap=PlanOverlap.ROUNDS)


def cluster_config(heads: Path, features: Path | None, **router: Any) -> ClusterConfig:
    return ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": TARGET}, **router),
        verifier=[VerifierConfig(model=TARGET, dtype="float32", features=features)],
        drafter=[DrafterConfig(model=TARGET, dtype="float32", heads=heads)],
    )


@asynccontextmanager
async def running(config: ClusterConfig) -> AsyncIterator[tuple[LocalCluster, list[str]]]:
    """A cluster, and what its servers print."""
    lines: list[str] = []
    async with LocalCluster(config, forward=lambda name, line: lines.append(f"{name}: {line}")) as cluster:
        await trust(cluster)
        yield cluster, lines


@pytest.fixture(scope="module")
def heads(tokenizer: Tokenizer, prompts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """EAGLE-3 heads that know the answer of the target to the first prompt."""
    folder = tmp_path_factory.mktemp("heads")
    taught_heads("eagle-3", TARGET, folder, greedy(TARGET, tokenizer.encode(prompts[0]).ids, TOKENS))
    return folder


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def cluster(heads: Path) -> AsyncIterator[LocalCluster]:
    config = cluster_config(heads, heads)
    async with running(config.model_copy(update={"drafter": [*config.drafter, PLAIN]})) as (cluster, _):
        yield cluster


def drafter_of(cluster: LocalCluster, *, heads: bool = True) -> Process:
    """The one with heads, or the one without."""
    drafters = (process for process in cluster.processes.values() if isinstance(process.section, DrafterConfig))
    return next(process for process in drafters if (process.section.heads is not None) == heads)  # type: ignore[attr-defined]


async def in_rounds(cluster: LocalCluster, prompt: list[int], temperature: float) -> tuple[Answer, Answer]:
    """Without speculation, and with the drafter in every step. Its stream to the verifier is open by then."""
    verifier, drafter = cluster.processes["verifier-0"].address, drafter_of(cluster).address
    contract = Contract(seed=3, max_tokens=TOKENS, temperature=temperature)
    await decode(verifier, prompt, replace(contract, max_tokens=4), plan=ROUNDS, drafters=[drafter])
    plain = await decode(verifier, prompt, contract, plan=OFF)
    return plain, await decode(verifier, prompt, contract, plan=ROUNDS, drafters=[drafter])


async def test_remote_heads_are_accepted_as_heads_in_the_verifier_and_keep_the_text(
    cluster: LocalCluster, heads: Path, tokenizer: Tokenizer, prompts: list[str]
) -> None:
    prompt = tokenizer.encode(prompts[0]).ids
    async with served(heads=heads) as client:
        _, inside = await both(client, prompts[0], temperature=0.0)
    for temperature in (0.0, 1.0):
        plain, fast = await in_rounds(cluster, prompt, temperature)
        assert fast.tokens == plain.tokens
        if temperature == 0.0:
            print(f"accepted: {inside.usage.accepted} inside, {fast.accepted} remotely")
            assert fast.accepted >= max(60, 0.9 * inside.usage.accepted)  # a busy verifier lets its heads rest


async def test_features_count_as_sent_bytes_and_only_go_to_drafters_that_asked(
    cluster: LocalCluster, heads: Path, tokenizer: Tokenizer, prompts: list[str]
) -> None:
    """Two bytes a number, 256 of them a token."""
    prompt = tokenizer.encode(prompts[0]).ids
    _, fast = await in_rounds(cluster, prompt, 0.0)
    sent = len(prompt) + sum(report.accepted + 1 for report in fast.reports[:-1])
    assert 512 * (sent - DEPTH - 1) < sum(report.wire_bytes for report in fast.reports) < 600 * sent
    contract = Contract(seed=3, max_tokens=TOKENS, temperature=0.0)
    verifier, plain = cluster.processes["verifier-0"].address, drafter_of(cluster, heads=False).address
    other = await decode(verifier, prompt, contract, plan=ROUNDS, drafters=[plain])
    assert other.tokens == fast.tokens
    assert 0 < sum(report.wire_bytes for report in other.reports) < 100 * sent


async def test_turns_on_a_warm_prefix_are_drafted_for(
    cluster: LocalCluster, tokenizer: Tokenizer, prompts: list[str]
) -> None:
    verifier, drafter = cluster.processes["verifier-0"].address, drafter_of(cluster).address
    prompt, contract = tokenizer.encode(prompts[0]).ids, Contract(seed=3, max_tokens=200, temperature=0.0)
    await decode(verifier, prompt, replace(contract, max_tokens=4), plan=ROUNDS, drafters=[drafter])  # opens its stream
    for _ in range(2):
        answer = await decode(verifier, prompt, contract, plan=ROUNDS, drafters=[drafter])
        joined = [report for report in answer.reports if report.drafters]
        assert sum(report.accepted for report in joined) > max(20, len(joined) / 2)
        prompt = [*prompt, *answer.tokens]
    assert answer.reports[0].rows < 10


async def test_a_replacement_of_a_killed_drafter_receives_the_features_by_snapshot(
    cluster: LocalCluster, tokenizer: Tokenizer, prompts: list[str]
) -> None:
    prompt, session = tokenizer.encode(prompts[0]).ids, "killed"
    verifier = cluster.processes["verifier-0"].address
    victim = drafter_of(cluster)
    replaced: list[int] = []  # after how many steps

    async def each(answer: Answer) -> None:
        if answer.accepted > 5 and not replaced:
            os.kill(victim.pid, signal.SIGKILL)
            assert isinstance(victim.section, DrafterConfig)
            await cluster.scale([victim.section.model_copy(update={"slots": 3}), PLAIN])
            await attach(drafter_of(cluster).address, session, verifier)
            replaced.append(len(answer.reports))
        elif replaced and not answer.reports[-1].drafters:
            await asyncio.sleep(0.1)  # the log lags, so that the new one can follow

    contract = Contract(seed=3, max_tokens=TOKENS, temperature=0.0)
    plain = await decode(verifier, prompt, contract, plan=OFF)
    answer = await decode(
        verifier, prompt, contract, plan=ROUNDS, drafters=[victim.address], session=session, each=each, pace=0.01
    )
    assert answer.tokens == plain.tokens
    accepted = [report.accepted for report in answer.reports]
    assert replaced
    assert sum(accepted[replaced[0] + DEPTH + 1 :]) > 5  # a window is committed before the log goes on


async def test_a_drafter_without_its_features_logs_the_remedy_once(
    heads: Path, prompts: list[str], tmp_path: Path
) -> None:
    random_heads("eagle-3", TARGET, tmp_path)
    for features, why in ((None, "start the verifier with"), (tmp_path, "give both the same folder")):
        async with running(cluster_config(heads, features)) as (cluster, lines):
            async with AsyncClient(cluster.router_address) as client:
                for prompt in prompts[:2]:
                    answer = await client.generate(prompt, max_tokens=300, temperature=0.0, ignore_eos=True)
                    assert (len(answer.token_ids), answer.usage.accepted) == (300, 0)
            assert answer.usage.speculation.reason is SpeculationReason.REFUSED  # from the second one on it is known
            assert "features:" in answer.usage.speculation.detail
            assert why in answer.usage.speculation.detail
            assert len([line for line in lines if "nothing can be drafted for it: features:" in line]) == 1
            assert any(why in line for line in lines)


async def test_heads_that_do_not_fit_are_refused_at_start(heads: Path, tmp_path: Path) -> None:
    random_heads("medusa", TARGET, tmp_path / "medusa")
    random_heads("eagle", TARGET, tmp_path / "eagle")
    verifier = VerifierConfig(model=TARGET, features=heads)
    for changes, why in (
        ({"features": tmp_path / "medusa"}, "take EAGLE heads"),
        ({"heads": tmp_path / "eagle"}, "give both the same folder"),
        ({"model": MODELS / "drafter"}, "take heads that were made for this target|a target whose width is 256"),
    ):
        with pytest.raises(ConfigError, match=why):
            load_verifier_part(verifier.model_copy(update=changes))
    drafter = DrafterConfig(model=TARGET, heads=heads)
    with pytest.raises(ConfigError, match="take EAGLE heads"):
        load_drafter_part(drafter.model_copy(update={"heads": tmp_path / "medusa"}))
    check_settings(drafter)
    for changes, why in (
        ({"layers": 2}, "give none of drafts, target"),
        ({"tier": 1}, "draft for verifiers of their own target"),
        ({"any_target": True}, "of their own target"),
        ({"dtype": "int8"}, "in float32 or bfloat16"),
        ({"kv_dtype": "int8"}, "leave out backend, dtype and kv_dtype"),
        ({"learns": True}, "learns: is for a drafter with a whole model"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_settings(drafter.model_copy(update=changes))
