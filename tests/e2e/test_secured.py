"""A whole cluster with certificates and keys: it works, it shuts others out, and it logs nothing of what it is sent."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

import outrider
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, TlsConfig, VerifierConfig
from outrider.errors import InvalidRequest, NotFound, OutriderError, Unauthenticated, Unavailable
from outrider.fleet.cluster import LocalCluster
from outrider.rpc.certificates import make
from outrider.store.api_keys import Keys
from outrider.store.redis.client import connect
from tests.e2e.conftest import MODELS

MARKER = "zyx_marker_7431"  # no server writes it by itself
WINDOW = 16  # characters of an answer that would not be in a log by chance
IDS = 5  # token ids in a row that would not be in a log by chance


class Secured(NamedTuple):
    """A running cluster, what its processes logged, and a key for each of two tenants."""

    cluster: LocalCluster
    lines: list[str]
    ca: Path
    one: str
    two: str

    def client(self, key: str) -> outrider.AsyncClient:
        return outrider.AsyncClient(self.cluster.router_address, api_key=key, ca=self.ca)


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    """A verifier that drafts from its tenants' answers, a drafter with the small model, and a tier below that one."""
    folder = tmp_path_factory.mktemp("certs")
    make(folder, drafters=["edge"])
    lines: list[str] = []
    target, small = MODELS / "target", MODELS / "drafter"
    config = ClusterConfig(
        tls=TlsConfig(ca=folder / "ca.pem", cert=folder / "{role}.pem", key=folder / "{role}.key"),
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}, auth="keys", tiers="all"),
        verifier=[VerifierConfig(model=target, dtype="float32", slots=4, lookup="suffix")],
        drafter=[
            DrafterConfig(
                model=small,
                dtype="float32",
                slots=4,
                ca=folder / "ca.pem",
                cert=folder / "drafter-edge.pem",
                key=folder / "drafter-edge.key",
            )
        ],
        tier={1: [DrafterConfig(model=small, slots=4, tier=1, drafts="suffix")]},
    )
    async with LocalCluster(config, forward=lambda name, line: lines.append(f"{name}: {line}")) as cluster:
        async with connect(cluster.redis_url) as redis:
            keys = Keys(redis)
            one, two = [(await keys.add(tenant))[0] for tenant in ("one", "two")]
        yield Secured(cluster, lines, folder / "ca.pem", one, two)


@pytest.mark.asyncio(loop_scope="session")
async def test_all_servers_cooperate_under_tls_and_the_text_is_the_targets(
    secured: Secured, prompts: list[str]
) -> None:
    async with secured.client(secured.one) as client:
        plain = await client.generate(prompts[0], max_tokens=48, temperature=0.0, speculation="off")
        async with asyncio.timeout(60):
            while True:  # until drafters of both tiers were there before the text was over
                drafted = await client.generate(prompts[0], max_tokens=48, temperature=0.0)
                assert drafted.token_ids == plain.token_ids
                session = await client.get_session(drafted.session_id)
                if len(session.drafters) == 2 and drafted.usage.acceptance_length > 1.0:
                    break
        assert sorted(drafter.rpartition("-")[0] for drafter in session.drafters) == ["drafter", "edge"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_rule_that_draws_from_q_runs_without_untrusted_drafters(secured: Secured, prompts: list[str]) -> None:
    async with secured.client(secured.one) as client:
        answer = await client.generate(prompts[0], max_tokens=48, seed=3, rule="speculative-sampling")
        assert len(answer.token_ids) == 48
        assert answer.usage.accepted == 0
        assert (await client.get_session(answer.session_id)).drafters == ()
        assert answer.usage.speculation.reason == "rule"


@pytest.mark.asyncio(loop_scope="session")
async def test_each_server_is_in_redis_as_the_user_of_its_role_and_needs_no_more(secured: Secured) -> None:
    async with secured.client(secured.two) as client:
        await client.generate("x", max_tokens=4)
    async with connect(secured.cluster.redis_url) as redis:
        users = {one["user"] for one in await redis.client_list()}
        assert users == {"default", "outrider-router", "outrider-verifier", "outrider-drafter"}
        assert await redis.acl_log() == []


@pytest.mark.asyncio(loop_scope="session")
async def test_no_server_writes_a_core_dump(secured: Secured) -> None:
    """It would hold keys and prompts. A hard limit of 0, which a server finds, is left as it is."""
    for process in secured.cluster.processes.values():
        for limits in core_limits(process.pid):
            assert limits in (["1", "1"], ["0", "0"]), process.role


def core_limits(pid: int) -> list[list[str]]:
    """The soft and the hard limit of core dumps, in bytes, of a process and of its children."""
    children = [it for task in Path(f"/proc/{pid}/task").iterdir() for it in (task / "children").read_text().split()]
    lines = [line for it in (pid, *children) for line in Path(f"/proc/{it}/limits").read_text().splitlines()]
    return [line.split()[4:6] for line in lines if line.startswith("Max core file size")]


@pytest.mark.asyncio(loop_scope="session")
async def test_strangers_are_refused_with_the_reason(secured: Secured, tmp_path: Path) -> None:
    make(tmp_path)
    address = secured.cluster.router_address
    async with outrider.AsyncClient(address, api_key="outrider_wrong", ca=secured.ca) as client:
        with pytest.raises(Unauthenticated, match="outrider keys add"):
            await client.models()
    async with outrider.AsyncClient(address, api_key=secured.one, ca=tmp_path / "ca.pem") as client:
        with pytest.raises(Unavailable, match="one CA"):
            await client.models()
    async with outrider.AsyncClient(address) as client:
        with pytest.raises(Unavailable, match="it requires TLS"):
            await client.models()


@pytest.mark.asyncio(loop_scope="session")
async def test_the_clusters_temporary_start_key_is_deleted(secured: Secured) -> None:
    async with connect(secured.cluster.redis_url) as redis:
        assert [key.tenant for key in await Keys(redis).listed()] == ["one", "two"]


@pytest.mark.asyncio(loop_scope="session")
async def test_neither_tenant_finds_the_others_sessions(secured: Secured, prompts: list[str]) -> None:
    async with secured.client(secured.one) as one, secured.client(secured.two) as two:
        session = (await one.generate(prompts[0], max_tokens=8)).session_id
        with pytest.raises(NotFound) as foreign:
            await two.get_session(session)
        with pytest.raises(NotFound) as absent:
            await two.get_session("0" * 32)
        assert str(foreign.value).replace(session, "ID") == str(absent.value).replace("0" * 32, "ID")
        await two.close_session(session)
        assert (await one.get_session(session)).length > 8


@pytest.mark.asyncio(loop_scope="session")
async def test_no_log_and_no_redis_key_s_name_holds_a_prompt_or_an_answer(secured: Secured, prompts: list[str]) -> None:
    """Also where requests are refused, calls break off, and a part dies."""
    prompt = f"{prompts[0]}\n# {MARKER}\n"
    answers: list[outrider.Generation] = []
    async with secured.client(secured.one) as client:
        answers.append(await client.generate(prompt, max_tokens=64, seed=1, idempotency_key=MARKER, logprobs=1))
        for wrong in (
            {"model": MARKER},
            {"stop": [MARKER * 100]},
            {"session": MARKER},
            {"max_tokens": 10**6},
            {"stop_ids": [10**6]},
        ):
            with pytest.raises(OutriderError):
                await client.generate(prompt, **wrong)  # type: ignore[arg-type]
        stream = client.stream(prompt, max_tokens=200, seed=2)
        async for _ in stream:
            break
        await stream.cancel()
        drafter = secured.cluster.processes["drafter-0"]
        stream = client.stream(prompt, max_tokens=128, seed=3)
        async for _ in stream:
            if drafter.status is None:
                os.kill(drafter.pid, signal.SIGKILL)
                await drafter.wait()
        answers.append(stream.result)
        await drafter.start(secured.cluster.redis_url)
        with pytest.raises(InvalidRequest):
            await client.generate(prompt, max_tokens=8, idempotency_key=MARKER)
        async with connect(secured.cluster.redis_url) as redis:
            names = [name.decode(errors="replace") for name in await redis.keys()]
    assert secured.lines, "nothing was logged, so nothing was tested"
    assert any(name.endswith(":log") for name in names)
    for text in (*secured.lines, *names):
        assert MARKER not in text
        assert secured.one.removeprefix("outrider_") not in text
        for answer in answers:
            assert not any(piece in text for piece in pieces(answer.text)), text
            assert not any(ids in text for ids in runs(answer.token_ids)), text


@pytest.mark.asyncio(loop_scope="session")
async def test_certificates_are_replaced_while_sessions_run(
    secured: Secured, prompts: list[str], tmp_path: Path
) -> None:
    """By those of another CA, even, for which there is a moment in which parts do not trust each other."""
    old = tmp_path / "old.pem"
    old.write_bytes(secured.ca.read_bytes())
    async with secured.client(secured.one) as client:
        plain = await client.generate(prompts[0], max_tokens=200, seed=5)
        stream, received = client.stream(prompts[0], max_tokens=200, seed=5), 0
        async for chunk in stream:
            if received < 20 <= (received := received + len(chunk.token_ids)):
                make(secured.ca.parent, drafters=["edge"], force=True)
        assert stream.result.token_ids == plain.token_ids
        assert stream.result.resumes == 0
        await asyncio.sleep(0.5)  # until the router has looked
    address = secured.cluster.router_address
    async with outrider.AsyncClient(address, api_key=secured.one, ca=old) as client:
        with pytest.raises(Unavailable, match="one CA"):
            await client.models()
    drafter = secured.cluster.processes["drafter-0"]
    await drafter.stop()
    await drafter.start(secured.cluster.redis_url)  # it comes with its new certificate
    async with secured.client(secured.one) as client:
        async with asyncio.timeout(30):
            while (again := await client.generate(prompts[0], max_tokens=200, seed=5)).usage.acceptance_length <= 1.2:
                await asyncio.sleep(0.2)
        assert again.token_ids == plain.token_ids


def pieces(text: str) -> list[str]:
    """All of its parts of `WINDOW` characters that are not blank for the most part."""
    parts = (text[start : start + WINDOW] for start in range(len(text) - WINDOW + 1))
    return [part for part in parts if len("".join(part.split())) > WINDOW // 2]


def runs(ids: Sequence[int]) -> list[str]:
    """All runs of `IDS` ids, as Python shows them."""
    return [", ".join(map(str, ids[start : start + IDS])) for start in range(len(ids) - IDS + 1)]
