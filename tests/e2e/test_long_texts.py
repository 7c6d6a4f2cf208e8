"""A text of 32,000 tokens begins, goes on, is forked and resumed, and no event loop stands still for it.

All servers run in the test's own process, on one loop: what one of them does there at a stretch, it sees.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from drafter_svc.server import run as run_drafter
from outrider.config import DrafterConfig, RouterConfig, VerifierConfig
from outrider.core.session.contract import Contract
from outrider.core.session.digest import EMPTY, extend
from outrider.engine.checkpoints.checkpoint import read_tokenizer_digest
from outrider.rpc.channels import open_channel
from outrider.store.records import SessionTurn
from outrider.store.redis.client import connect
from outrider.store.redis.embedded import EmbeddedRedis
from outrider.store.registry import Registry
from outrider.store.sessions import Sessions
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.drafter_pb2_grpc import DrafterStub
from outrider.v1.inference_pb2_grpc import InferenceStub
from router.server import run as run_router
from tests.e2e.conftest import MODELS
from tests.e2e.tiny_models import VOCABULARY, make_tiny
from tests.hostile.rig import serving
from tests.loops import no_stall
from tests.router.rig import collect
from verifier_svc.server import run as run_verifier

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = 32_000
TEXT = random.Random(1).choices(range(1, VOCABULARY), k=LONG)


@dataclass(frozen=True)
class Running:
    """A cluster in this process."""

    router: InferenceStub
    drafters: list[DrafterStub]
    sessions: Sessions
    registry: Registry
    digest: bytes


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """One verifier that looks up too, and two drafters: one has a model, one looks up."""
    folder = make_tiny(tmp_path_factory.mktemp("long") / "tiny", layers=1, width=16, context=2 * LONG + 1000)
    shutil.copy(MODELS / "target" / "tokenizer.json", folder)  # a real one takes its time
    common: dict[str, Any] = {"model": folder, "name": "tiny", "dtype": "float32", "listen": "127.0.0.1:0"}
    redis_url = redis_server.url
    async with AsyncExitStack() as stack:
        verifier = VerifierConfig(**common, slots=3, prefill_chunk=1024, lookup="suffix")
        await stack.enter_async_context(serving(run_verifier, verifier, redis_url))
        drafters = []
        for changes in ({"prefill_chunk": 1024}, {"drafts": "suffix"}):
            drafter = DrafterConfig(**common, slots=3, **changes)
            address = await stack.enter_async_context(serving(run_drafter, drafter, redis_url))
            drafters.append(DrafterStub(await stack.enter_async_context(open_channel(address))))
        router = RouterConfig(
            listen="127.0.0.1:0",
            models={"tiny": folder},
            drafters_per_session=2,
            max_request_bytes=2**20,
            overlap=True,
        )
        address = await stack.enter_async_context(serving(run_router, router, redis_url))
        channel = await stack.enter_async_context(open_channel(address))
        client = connect(redis_url)
        stack.push_async_callback(client.aclose)
        async with asyncio.timeout(20):
            while len(await Registry(client).workers()) < 3:
                await asyncio.sleep(0.05)
        sessions = Sessions(client, ttl_s=60, lease_s=5, resume_ttl_s=30)
        registry = Registry(client)
        yield Running(InferenceStub(channel), drafters, sessions, registry, read_tokenizer_digest(folder))


def asked(tokens: list[int], **fields: Any) -> pb.GenerateRequest:
    sampling = pb.Sampling(max_tokens=24, temperature=0.0)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=tokens), sampling=sampling, **fields)


@pytest.mark.timeout(240)
async def test_a_long_prompt_its_drafters_its_next_turn_and_its_fork_stall_no_loop(cluster: Running) -> None:
    async with no_stall():
        started, chunks, _ = await collect(cluster.router.Generate(asked(TEXT)))
        answer = [token for chunk in chunks for token in chunk.token_ids]
        again, _, _ = await collect(cluster.router.Generate(asked([1, 2, 3], session_id=started.session_id)))
        changed = [*TEXT, *answer[:12], 1, 2, 3]
        forked, _, _ = await collect(
            cluster.router.Generate(asked(changed, session_id=started.session_id, whole_history=True))
        )
        described = [await drafter.Describe(types_pb2.DescribeRequest()) for drafter in cluster.drafters]
    assert again.cached_tokens > LONG - 10
    assert forked.forked_from == started.session_id
    assert forked.cached_tokens > LONG - 10
    assert all(drafter.levels for drafter in described), "each was sent the text, and reads it"


@pytest.mark.timeout(120)
async def test_a_resume_of_a_long_answer_stalls_no_loop(cluster: Running) -> None:
    """As after a router that died: the log holds 2,000 tokens of prompt and 30,000 of answer."""
    sessions, session = cluster.sessions, "of a router that died"
    contract = Contract(seed=1, max_tokens=30_008, temperature=0.0)
    await sessions.create(session, "", "tiny", cluster.digest)
    prompt, answer = TEXT[:2000], TEXT[2000:]
    owned = await sessions.begin(
        session, 0, "it", SessionTurn(contract, (), 2000, None), 0, prompt, extend(EMPTY, prompt)
    )
    (verifier,) = await cluster.registry.workers("verifier")
    for at in range(0, len(answer), 6000):
        end = 2000 + at + 6000
        await owned.append(2000 + at, answer[at : at + 6000], extend(EMPTY, TEXT[:end]), origin=verifier.origin)
    await owned.release("")
    async with no_stall():
        _, chunks, finished = await collect(cluster.router.Resume(pb.ResumeRequest(session_id=session)))
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens[:30_000] == answer
    assert len(tokens) == 30_008
    assert finished.usage.completion_tokens == 30_008
