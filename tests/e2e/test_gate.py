"""Drafters that dial a router: they need no port, no Redis, and no way to a verifier but the router."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.client import AsyncClient, SpeculationReason
from outrider.config import ClusterConfig, RouterConfig, TlsConfig, VerifierConfig
from outrider.errors import Forbidden, InvalidRequest
from outrider.fleet.cluster import LocalCluster
from outrider.rpc.certificates import make
from outrider.rpc.lifecycle import USER_ERROR_STATUS
from outrider.store.api_keys import READERS_S, Keys, TextReaders
from outrider.store.redis.client import connect
from outrider.store.registry import Registry
from tests.drafter.other_tokenizer import make_other
from tests.e2e.conftest import MODELS
from tests.e2e.laptop import dialed

pytestmark = pytest.mark.asyncio(loop_scope="session")

TERMS: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "seed": 3, "temperature": 0.7}


@asynccontextmanager
async def cluster(certificates: Path | None = None, **routing: Any) -> AsyncIterator[LocalCluster]:
    made = certificates and TlsConfig(
        ca=certificates / "ca.pem", cert=certificates / "{role}.pem", key=certificates / "{role}.key"
    )
    config = ClusterConfig(
        tls=made,
        router=RouterConfig(listen="127.0.0.1:0", models={"target": MODELS / "target"}, **routing),
        verifier=[VerifierConfig(model=MODELS / "target", dtype="float32", slots=4)],
    )
    async with LocalCluster(config, forward=lambda name, line: print(name, line)) as running:
        yield running


async def drafted(client: AsyncClient, prompt: str, attempts: int = 10) -> int:
    """Accepted drafts of a text that is the plain one, of as many attempts as it takes."""
    plain = await client.generate(prompt, speculation="off", **TERMS)
    for _ in range(attempts):
        fast = await client.generate(prompt, speculation="rounds", **TERMS)
        assert fast.token_ids == plain.token_ids
        if fast.usage.accepted:
            return fast.usage.accepted
    return 0


async def until_drafters(client: AsyncClient, count: int) -> None:
    """Waits until a router lists as many drafters."""
    async with asyncio.timeout(10):
        while [model.drafters for model in await client.models()] != [count]:
            await asyncio.sleep(0.1)


async def test_a_drafter_that_dials_drafts_through_the_router(prompts: list[str]) -> None:
    async with cluster() as running, AsyncClient(running.router_address) as client:
        assert not await drafted(client, prompts[0], attempts=1)
        async with dialed(running.router_address):
            assert await drafted(client, prompts[0])
            assert [model.drafters for model in await client.models()] == [1]
        await until_drafters(client, 0)
        after = await client.generate(prompts[0], speculation="rounds", **TERMS)
        assert after.usage.accepted == 0
        assert after.usage.speculation.reason is SpeculationReason.NO_DRAFTER


async def test_of_several_models_it_takes_the_one_that_suits_the_target(prompts: list[str], tmp_path: Path) -> None:
    other, gone = make_other(tmp_path / "other"), tmp_path / "gone.gguf"
    candidates = [word for model in (other, gone, MODELS / "mid") for word in ("--candidates", str(model))]
    async with cluster() as running, AsyncClient(running.router_address) as client:
        async with dialed(running.router_address, *candidates) as laptop:
            assert await drafted(client, prompts[0])
        printed = "".join(laptop.printed)
    assert f"left out: {other}: has the tokenizer of no target there (target); give --target" in printed
    assert f"left out: {gone}: missing;" in printed
    assert all(f"{MODELS / name}: a level takes" in printed for name in ("drafter", "mid"))
    assert re.search(rf"takes {MODELS}/(drafter|mid)$", printed, re.MULTILINE)


async def test_models_of_which_none_suits_are_refused_each_with_its_reason(tmp_path: Path) -> None:
    flags = ("--model", str(make_other(tmp_path / "other")), "--candidates", str(tmp_path / "gone"))
    async with cluster() as running:
        with pytest.raises(EOFError, match=r"(?s)none of them can draft here; .*no target there.*gone"):
            async with dialed(running.router_address, *flags):
                pass


async def test_a_drafter_that_is_killed_disturbs_no_answer_and_another_takes_its_place(prompts: list[str]) -> None:
    async with cluster() as running, AsyncClient(running.router_address) as client:
        plain = await client.generate(prompts[0], speculation="off", **TERMS | {"max_tokens": 300})
        async with dialed(running.router_address) as first:
            assert await drafted(client, prompts[1])
            stream = client.stream(prompts[0], speculation="rounds", **TERMS | {"max_tokens": 300})
            chunks = 0
            async for _ in stream:
                chunks += 1
                if chunks == 5:
                    os.kill(first.pid, signal.SIGKILL)
            assert stream.result.token_ids == plain.token_ids
        async with dialed(running.router_address):
            assert await drafted(client, prompts[2])


async def test_a_drafter_dials_again_when_its_router_is_back(prompts: list[str]) -> None:
    async with cluster() as running:
        router = running.processes["router"]
        async with dialed(router.address):
            async with AsyncClient(router.address) as client:
                assert await drafted(client, prompts[0])
            os.kill(router.pid, signal.SIGKILL)
            await router.wait()
            router.section = router.section.model_copy(update={"listen": router.address})
            await router.start(running.redis_url)
            async with AsyncClient(router.address) as client:
                assert await drafted(client, prompts[1])


async def test_a_router_with_keys_lets_in_drafters_with_keys_for_that_alone(prompts: list[str]) -> None:
    async with cluster(auth="keys") as running:
        router = running.router_address
        async with aclosing(connect(running.redis_url_of("keys"))) as redis:
            keys = Keys(redis)
            (caller, _), (drafter, revoked) = await keys.add("acme"), await keys.add("acme", role="drafter")
            for wrong in ("", caller, "outrider_unknown"):
                with pytest.raises(EOFError, match=r"outrider: connect: .*API key"):
                    async with dialed(router, key=wrong):
                        pass
            async with AsyncClient(router, api_key=drafter, tls=False) as client:
                with pytest.raises(Forbidden, match="this API key is for a drafter"):
                    await client.generate(prompts[0])
            async with (
                AsyncClient(router, api_key=caller, tls=False) as client,
                dialed(router, key=drafter) as laptop,
            ):
                assert await drafted(client, prompts[0])
                await keys.revoke(revoked.key_id)
                assert await laptop.process.wait() == USER_ERROR_STATUS
                await until_drafters(client, 0)


async def test_a_tenants_texts_are_for_its_own_drafters_the_clusters_or_all(prompts: list[str]) -> None:
    async with cluster(auth="keys") as running, aclosing(connect(running.redis_url_of("keys"))) as redis:
        keys, readers, router = Keys(redis), TextReaders(redis), running.router_address
        (of_acme, _), (of_other, _), (drafter, _) = [
            await keys.add("acme"),
            await keys.add("other"),
            await keys.add("other", role="drafter"),
        ]
        async with (
            dialed(router, key=drafter),
            AsyncClient(router, api_key=of_acme, tls=False) as acme,
            AsyncClient(router, api_key=of_other, tls=False) as other,
        ):
            assert await drafted(other, prompts[0])
            assert not await drafted(acme, prompts[1], attempts=3)
            await readers.set("acme", "any")
            await asyncio.sleep(READERS_S)
            assert await drafted(acme, prompts[2])
            await readers.set("other", "own")
            await asyncio.sleep(READERS_S)
            assert await drafted(other, prompts[3])


async def test_a_cluster_with_certificates_takes_a_drafter_without_one_through_its_router(
    tmp_path: Path, prompts: list[str]
) -> None:
    make(tmp_path)
    async with cluster(tmp_path, auth="keys") as running, aclosing(connect(running.redis_url_of("keys"))) as redis:
        keys, ca, router = Keys(redis), tmp_path / "ca.pem", running.router_address
        (caller, _), (drafter, _) = await keys.add("acme"), await keys.add("acme", role="drafter")
        async with AsyncClient(router, api_key=caller, ca=ca) as client, dialed(router, key=drafter, ca=str(ca)):
            assert await drafted(client, prompts[0])


async def test_a_key_is_for_some_models_and_sessions(prompts: list[str]) -> None:
    async with cluster(auth="keys") as running, aclosing(connect(running.redis_url_of("keys"))) as redis:
        keys, router = Keys(redis), running.router_address
        caller, _ = await keys.add("acme")
        elsewhere, _ = await keys.add("acme", role="drafter", models=["another"])
        here, _ = await keys.add("acme", role="drafter", models=["another", "target"], sessions=1)
        async with AsyncClient(router, api_key=caller, tls=False) as client:
            async with dialed(router, key=elsewhere):
                assert not await drafted(client, prompts[0], attempts=3)
            async with dialed(router, key=here), aclosing(connect(running.redis_url)) as admin:
                assert await drafted(client, prompts[1])
                assert [it.slots for it in await Registry(admin).workers("drafter")] == [1]
        with pytest.raises(InvalidRequest, match="role: is caller"):
            await keys.add("acme", models=["target"])
