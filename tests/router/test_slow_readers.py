"""Clients that stop reading hold a bounded piece of their answer in the router, pause alone, and lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.v1 import inference_pb2 as pb
from outrider.v1.inference_pb2_grpc import InferenceStub
from router.sessions import outbox
from tests.hostile.rig import resident_bytes
from tests.router import fakes
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, Rig, ask, drain, running_router, until

SLOW, NORMAL = 12, 4
STRIDE = 16  # tokens of a chunk, which has two kilobytes with their log-probabilities
TOKENS = 100_000  # of an answer: a hundred megabytes for all that do not read
HELD = 2**18  # bytes of an answer that a router may hold for one client, gRPC's own included
SMALL = (  # what gRPC takes for a client that does not read grows to megabytes, which are the client's own
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2**16),
    ("grpc.use_local_subchannel_pool", 1),
)


@asynccontextmanager
async def unread(rig: Rig) -> AsyncIterator[list[tuple[str, Any]]]:
    """Calls of clients that read the beginning and no more, with their sessions."""
    async with AsyncExitStack() as stack:
        calls = []
        for _ in range(SLOW):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(rig.address, options=SMALL))
            call = InferenceStub(channel).Generate(ask(max_tokens=TOKENS, logprobs=20))
            calls.append(((await call.read()).started.session_id, call))
        yield calls
        for _, call in calls:
            call.cancel()


async def rate(received: list[int], seconds: float) -> float:
    """Tokens a second of those that read."""
    before = sum(received)
    await asyncio.sleep(seconds)
    return (sum(received) - before) / seconds


async def test_clients_that_do_not_read_pause_alone_and_continue_where_they_stopped(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "SLOW_CLIENT_S", 4.0)
    monkeypatch.setattr(fakes, "CONTEXT", 2 * TOKENS)
    verifier = FakeVerifier(SCRIPT, stride=STRIDE, pace_s=0.02)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest) as worker:
        await rig.registry.announce(replace(worker, slots=SLOW + NORMAL), ttl_s=60)
        await asyncio.sleep(0.5)  # until the router has looked
        received = [0] * NORMAL

        async def read(number: int) -> None:
            async for event in rig.stub.Generate(ask(max_tokens=TOKENS)):
                received[number] += len(event.chunk.token_ids)

        readers = [asyncio.create_task(read(number)) for number in range(NORMAL)]
        await rate(received, 0.5)
        alone, memory = await rate(received, 1.5), resident_bytes()

        async def lengths() -> list[int]:
            return [(await rig.sessions.get(session_id)).length for session_id, _ in calls]

        async with unread(rig) as calls:
            before: list[int] = []
            while before != (now := await lengths()):  # until all stand still
                before = now
                await asyncio.sleep(0.25)
            assert verifier.open == SLOW + NORMAL
            beside = await rate(received, 1.5)
            size = len(pb.GenerateResponse(chunk=await one_chunk(rig, calls[0][0])).SerializeToString())
            held = max(before) * size
            grown = resident_bytes() - memory
            print(f"\n{SLOW} clients stopped after {max(before)} tokens, {held / 2**10:.0f} KiB each; ", end="")
            print(f"memory +{grown / 2**20:.1f} MiB; {NORMAL} others {alone:.0f} -> {beside:.0f} tokens/s")
            assert held < HELD
            assert grown < SLOW * 4 * HELD + 8 * 2**20
            assert beside > 0.6 * alone
            await until(lambda: verifier.open == NORMAL, 10)  # their places go to others
            assert (await lengths()) == before
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def one_chunk(rig: Rig, session_id: str) -> pb.Chunk:
    """As much of a session's answer as one token takes, as the log has it."""
    prompt = MODEL.tokenizer.encode("import os\n").ids
    log = await rig.sessions.read(session_id, len(prompt))
    each = len(log.logprobs) // len(log.tokens)
    entries = pb.TokenLogprobs(logprob=-1.0, top_ids=[1000] * (each // 8), top_logprobs=[-1.0] * (each // 8))
    return pb.Chunk(text="abc", token_ids=[1000], gaps=[0.5], logprobs=[entries])


async def test_a_client_that_reads_again_finds_its_whole_answer(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "SLOW_CLIENT_S", 0.5)
    monkeypatch.setattr(fakes, "CONTEXT", 2 * TOKENS)
    count = 3000
    verifier = FakeVerifier(SCRIPT, stride=STRIDE)
    async with running_router(redis_url) as rig, announced(verifier, rig.registry, MODEL.digest):
        async with grpc.aio.insecure_channel(rig.address, options=SMALL) as channel:
            stub = InferenceStub(channel)
            call = stub.Generate(ask(max_tokens=count, logprobs=20))
            started = (await call.read()).started
            await until(lambda: verifier.open == 0, 20)
            events: list[pb.GenerateResponse] = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await drain(call, events)
            tokens = [token for event in events for token in event.chunk.token_ids]
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert 0 < len(tokens) < count
            place = started.prompt_tokens + len(tokens)
            async for event in stub.Resume(pb.ResumeRequest(session_id=started.session_id, next_position=place)):
                tokens += event.chunk.token_ids
        assert tokens == [SCRIPT[index % len(SCRIPT)] for index in range(count)]
