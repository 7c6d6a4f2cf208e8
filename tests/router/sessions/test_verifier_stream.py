"""A generation's stream on a verifier, where it cannot even be begun."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from outrider.core.session.contract import OFF, Contract
from outrider.store.redis.client import connect
from outrider.store.registry import Registry
from router.scheduling.workers import WorkerPool
from router.sessions.verifier_link import VerifierLinks
from router.sessions.verifier_stream import open_stream
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL


async def test_a_stream_that_cannot_be_begun_raises_the_real_error_and_counts_nothing(redis_url: str) -> None:
    client = connect(redis_url)
    registry = Registry(client)
    worker_pool = WorkerPool(registry)
    resources: Any = SimpleNamespace(
        worker_pool=worker_pool,
        verifier_links=VerifierLinks(worker_pool.channels.to, 5.0),
        config=SimpleNamespace(window=8, lease_s=5.0),
    )
    contract = Contract(seed=1, max_tokens=4)
    opened: Any = SimpleNamespace(
        model=MODEL,
        record=SimpleNamespace(session_id="s", tenant="", model=MODEL.name, tokenizer_digest=MODEL.digest),
        turn=SimpleNamespace(contract=contract, answer_position=2),
        response=SimpleNamespace(start=2, digest=0),
        left_s=1.0,
    )
    places: Any = {"kv_holder": "", "on_attempt": lambda _: None, "stalled": []}
    token_log: Any = SimpleNamespace(tokens=[1, 2], epoch=1, origin=None)
    async with announced(FakeVerifier([1]), registry, MODEL.digest):
        (worker,) = await worker_pool.verifiers(MODEL.name)
        await worker_pool.channels.to(worker).close()
        with pytest.raises(grpc.aio.UsageError, match="closed"):
            async with open_stream(resources, opened, token_log, contract=contract, plan=OFF, **places):
                pass
        assert worker_pool.sessions(worker) == 0
    await worker_pool.channels.close()
    await client.aclose()
