"""A tenant's bounds in Redis, as its callers meet them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.store.tenant_storage import SESSION_BYTES
from outrider.v1 import inference_pb2 as pb
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, Rig, ask, collect, running_router


async def refused(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return str(caught.value.details())


async def taken(rig: Rig) -> int:
    """What is counted for the one tenant of a router without keys."""
    (key,) = await rig.client.keys("outrider:{usage:*}:bytes")
    return int(await rig.client.hget(key, ""))


async def test_sessions_are_counted_until_they_are_closed(redis_url: str) -> None:
    async with running_router(redis_url, tenant_stored_sessions=2) as rig:
        first, _ = [(await rig.stub.CreateSession(pb.CreateSessionRequest())).session_id for _ in range(2)]
        assert "tenant_stored_sessions" in await refused(rig.stub.CreateSession(pb.CreateSessionRequest()))
        await rig.stub.CloseSession(pb.CloseSessionRequest(session_id=first))
        await rig.stub.CreateSession(pb.CreateSessionRequest())


async def test_a_generation_counts_its_possible_bytes_and_then_its_written_ones(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT, pace_s=0.05)
    async with (
        running_router(redis_url, tenant_stored_bytes=10_000) as rig,
        announced(verifier, rig.registry, MODEL.digest),
    ):
        call = rig.stub.Generate(ask(max_tokens=40))
        await call.read()
        running = await taken(rig)
        assert "tenant_stored_bytes" in await refused(collect(rig.stub.Generate(ask(max_tokens=60, logprobs=20))))
        call.cancel()
        while (ended := await taken(rig)) >= running:
            await asyncio.sleep(0.01)
        assert ended > SESSION_BYTES


async def test_a_full_redis_refuses_new_sessions_and_keeps_running_ones(redis_url: str) -> None:
    async with (
        running_router(redis_url) as rig,
        announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest),
    ):
        session_id = (await rig.stub.CreateSession(pb.CreateSessionRequest())).session_id
        request = pb.GenerateRequest(session_id=session_id, text="x", sampling=pb.Sampling(max_tokens=4))
        await collect(rig.stub.Generate(request))
        used = int((await rig.client.info("memory"))["used_memory"])
        try:
            await rig.client.config_set("maxmemory", round(used / 0.95))
            problem = ""
            for _ in range(200):
                try:
                    await rig.stub.CreateSession(pb.CreateSessionRequest())
                except grpc.aio.AioRpcError as error:
                    problem = str(error.details())
                    break
                await asyncio.sleep(0.05)
            assert "Redis is almost full, so no session begins" in problem
            _, chunks, _ = await collect(rig.stub.Generate(request))
            assert sum(len(chunk.token_ids) for chunk in chunks) == 4
        finally:
            await rig.client.config_set("maxmemory", 0)
