"""15. The gate."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from drafter_svc.choice import targets_at
from outrider.client import AsyncClient
from outrider.core.session.protocol import PROTOCOL
from outrider.engine.checkpoints.checkpoint import read_tokenizer_digest
from outrider.engine.checkpoints.model_card import weights_digest
from outrider.fleet.cluster import LocalCluster
from outrider.store.redis.client import connect
from outrider.store.registry import Registry, Worker
from outrider.wire import drafter as wire
from tests.e2e.conftest import MODELS
from tests.e2e.laptop import dialed
from tests.e2e.test_gate import TERMS, cluster, drafted

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONNECT, DRAFT = "/outrider.v1.DrafterGate/Connect", "/outrider.v1.TreeSink/Draft"
DIGEST = read_tokenizer_digest(MODELS / "target")
numbers = itertools.count(1)


def entry(**changes: Any) -> wire.GateUp:
    said: dict[str, Any] = {
        "drafter_id": f"liar-{next(numbers):08x}",
        "model": "liar",
        "tokenizer_digest": DIGEST,
        "vocabulary": 4096,
        "context": 1024,
        "slots": 8,
        "protocol": PROTOCOL,
    }
    return wire.GateUp(drafter=wire.GatedDrafter(**said | changes))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running() -> AsyncIterator[LocalCluster]:
    async with cluster() as it:
        yield it


@asynccontextmanager
async def stream(running: LocalCluster, method: str = CONNECT, **metadata: str) -> AsyncIterator[Any]:
    """A stream of bytes to the router."""
    async with grpc.aio.insecure_channel(running.router_address) as channel:
        named = tuple((name.replace("_", "-"), value) for name, value in metadata.items())
        call: Any = channel.stream_stream(method)(metadata=named)
        yield call
        call.cancel()


async def down(call: Any) -> wire.GateDown:
    return wire.GateDown.FromString(await asyncio.wait_for(call.read(), 10))


async def ended(call: Any) -> str:
    """How the router has ended a stream."""
    try:
        while (await asyncio.wait_for(call.read(), 10)) is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return f"{(await call.code()).name}: {await call.details()}"


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (b"\xff" * 10, "message: is not one of this protocol"),
        (b"x" * 70_000, "message: has 70000 bytes"),
        (wire.GateUp().SerializeToString(), "drafter_id: must be a name and eight hexadecimal digits"),
        (entry(drafter_id="x" * 5000).SerializeToString(), "drafter_id: must be a name and eight"),
        (entry(vocabulary=0).SerializeToString(), "drafter: must have a vocabulary, a context and slots"),
        (entry(slots=2**32 - 1).SerializeToString(), "drafter: must have a vocabulary, a context and slots"),
        (entry(protocol=99).SerializeToString(), "the drafter speaks protocol 99"),
    ],
    ids=["junk", "long", "nothing", "a long id", "no vocabulary", "too many slots", "another protocol"],
)
async def test_what_is_no_drafter_is_told_so(running: LocalCluster, first: bytes, why: str) -> None:
    async with stream(running) as call:
        await call.write(first)
        assert why in await ended(call)


async def test_a_drafter_that_has_not_dialed_yet_is_told_what_it_could_draft_for(running: LocalCluster) -> None:
    (target,) = await targets_at(running.router_address, None)
    assert (target.model, target.tokenizer_digest) == ("target", DIGEST)
    assert target.weights == weights_digest(MODELS / "target")
    assert 100 < target.pass_us < 1_000_000


async def test_one_that_says_nothing_or_becomes_another_is_let_go(running: LocalCluster) -> None:
    async with stream(running) as silent, stream(running) as changing:
        first = entry()
        await changing.write(first.SerializeToString())
        assert (await down(changing)).WhichOneof("frame") == "welcome"
        first.drafter.context += 1
        await changing.write(first.SerializeToString())
        assert "drafter: has changed" in await ended(changing)
        assert "has been silent" in await ended(silent)


async def test_an_id_that_dials_again_takes_the_place_of_its_stream(running: LocalCluster) -> None:
    first = entry()
    async with stream(running) as one, stream(running) as two:
        for call in (one, two):
            await call.write(first.SerializeToString())
            assert (await down(call)).WhichOneof("frame") == "welcome"
        async with AsyncClient(running.router_address) as client:
            assert [model.drafters for model in await client.models()] == [1]


async def test_a_drafter_that_answers_no_call_or_wrongly_delays_nobody(
    running: LocalCluster, prompts: list[str]
) -> None:
    async with AsyncClient(running.router_address) as client:
        plain = await client.generate(prompts[0], speculation="off", **TERMS)
        async with dialed(running.router_address), stream(running) as call:
            first = entry(slots=10_000)
            await call.write(first.SerializeToString())

            async def lie() -> None:
                for number in itertools.count():
                    answer = wire.GateAnswer(call=number % 50, attached=wire.AttachResponse(refused="x" * 1000))
                    await call.write(wire.GateUp(answer=answer).SerializeToString())
                    if not number % 100:
                        await call.write(first.SerializeToString())
                        await asyncio.sleep(0.05)

            async def read() -> None:
                while (await call.read()) is not grpc.aio.EOF:
                    pass

            lying = [asyncio.create_task(lie()), asyncio.create_task(read())]
            for _ in range(3):
                fast = await asyncio.wait_for(client.generate(prompts[0], **TERMS), 20)
                assert fast.token_ids == plain.token_ids
            assert await drafted(client, prompts[1])  # by the honest one
            for task in lying:
                task.cancel()


async def test_the_relay_is_for_drafters_at_the_gate_and_for_verifiers(running: LocalCluster) -> None:
    hello = wire.DraftUp(hello=wire.Hello(drafter_id="liar-ffffffff", tokenizer_digest=DIGEST, vocabulary=4096))
    async with stream(running, DRAFT, outrider_upstream="verifier-1") as call:
        await call.write(hello.SerializeToString())
        assert "'liar-ffffffff' has not dialed this router" in await ended(call)
    for first in (b"", b"\xff" * 20, wire.DraftUp(heartbeat=wire.Heartbeat()).SerializeToString()):
        async with stream(running, DRAFT) as call:
            await call.write(first)
            assert "INVALID_ARGUMENT" in await ended(call)
    known = entry()
    async with stream(running) as gate:
        await gate.write(known.SerializeToString())
        await down(gate)
        hello.hello.drafter_id = known.drafter.drafter_id
        for upstream in ("", "127.0.0.1:22", "verifier-00000000"):
            async with stream(running, DRAFT, outrider_upstream=upstream) as call:
                await call.write(hello.SerializeToString())
                assert "there is no such verifier any more" in await ended(call)


async def test_a_relayed_stream_ends_with_the_drafters_own(running: LocalCluster) -> None:
    known = entry()
    async with stream(running) as gate:
        await gate.write(known.SerializeToString())
        await down(gate)
        hello = wire.Hello(drafter_id=known.drafter.drafter_id, tokenizer_digest=DIGEST, vocabulary=4096)
        upstream = (await verifier_of(running)).worker_id
        async with stream(running, DRAFT, outrider_upstream=upstream) as call:
            await call.write(wire.DraftUp(hello=hello).SerializeToString())
            welcome = wire.DraftDown.FromString(await asyncio.wait_for(call.read(), 10))
            assert welcome.welcome.upstream_id == upstream
            gate.cancel()
            assert "the drafter has left the gate" in await ended(call)


async def verifier_of(running: LocalCluster) -> Worker:
    async with aclosing(connect(running.redis_url)) as redis:
        (verifier,) = await Registry(redis).workers("verifier")
        return verifier
