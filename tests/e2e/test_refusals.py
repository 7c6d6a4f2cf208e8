"""What is wrong is refused with the field's name and the right status, and no other session notices."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from tokenizers import Tokenizer

from outrider.cli.cluster import LocalCluster
from outrider.core.contract import Contract
from outrider.core.digest import EMPTY, extend
from outrider.rpc.channels import open_channel
from outrider.rpc.codec import contract_to_pb, plan_to_pb
from outrider.rpc.liveness import HEARTBEAT_S
from outrider.v1 import drafter_pb2, types_pb2, verifier_pb2
from outrider.v1.drafter_pb2_grpc import TreeSinkStub
from outrider.v1.verifier_pb2_grpc import VerifierStub
from tests.e2e.mini_router import SPECULATE, decode, ticket

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def described(verifier: str) -> verifier_pb2.VerifierDescription:
    async with open_channel(verifier) as channel:
        return await VerifierStub(channel).Describe(types_pb2.DescribeRequest())


async def start_of(verifier: str, **changes: Any) -> verifier_pb2.DecodeStart:
    """A good start, with changes."""
    description = await described(verifier)
    tokens = [259, 361, 1085]
    fields: dict[str, Any] = {
        "session_id": "refused",
        "epoch": 1,
        "model": description.model,
        "tokenizer_digest": description.tokenizer_digest,
        "tokens": tokens,
        "digest": extend(EMPTY, changes.get("tokens", tokens)),
        "answer_position": 3,
        "contract": contract_to_pb(Contract(seed=1, max_tokens=4)),
        "plan": plan_to_pb(SPECULATE),
        "window": 64,
        "lease_ms": 10_000,
    }
    return verifier_pb2.DecodeStart(**(fields | changes))


async def refusal(verifier: str, *requests: verifier_pb2.DecodeRequest) -> tuple[grpc.StatusCode, str]:
    """How the verifier ends a Decode call that says this and waits."""

    async def say() -> AsyncIterator[verifier_pb2.DecodeRequest]:
        for request in requests:
            yield request
        await asyncio.sleep(10)

    async with open_channel(verifier) as channel:
        try:
            async for _ in VerifierStub(channel).Decode(say(), timeout=10):
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    raise AssertionError("it was accepted")


def absurd(**changes: Any) -> types_pb2.Contract:
    contract = contract_to_pb(Contract(seed=1, max_tokens=4))
    for name, value in changes.items():
        setattr(contract, name, value)
    return contract


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"model": "gpt"}, grpc.StatusCode.NOT_FOUND, "target"),
        ({"tokenizer_digest": b"x" * 16}, grpc.StatusCode.FAILED_PRECONDITION, "tokenizer_digest"),
        ({"tokens": []}, grpc.StatusCode.INVALID_ARGUMENT, "tokens"),
        ({"tokens": [1, 2, 4096]}, grpc.StatusCode.INVALID_ARGUMENT, "4095"),
        ({"digest": 7}, grpc.StatusCode.INVALID_ARGUMENT, "digest"),
        ({"answer_position": 4}, grpc.StatusCode.INVALID_ARGUMENT, "answer_position"),
        ({"window": 0}, grpc.StatusCode.INVALID_ARGUMENT, "window"),
        ({"window": 2**31}, grpc.StatusCode.INVALID_ARGUMENT, "window"),
        ({"lease_ms": 0}, grpc.StatusCode.INVALID_ARGUMENT, "lease_ms"),
        ({"contract": absurd(max_tokens=1022)}, grpc.StatusCode.INVALID_ARGUMENT, "1024"),
        ({"contract": absurd(temperature=-1)}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ({"contract": absurd(top_p=7)}, grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
        ({"contract": absurd(rule="guess")}, grpc.StatusCode.INVALID_ARGUMENT, "shared-noise"),
        ({"plan": types_pb2.Plan(depth=65)}, grpc.StatusCode.INVALID_ARGUMENT, "plan.depth"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
async def test_a_wrong_start_is_refused_by_its_field(
    cluster: LocalCluster, changes: dict[str, Any], status: grpc.StatusCode, says: str
) -> None:
    verifier = cluster.processes["verifier-0"].address
    start = await start_of(verifier, **changes)
    code, details = await refusal(verifier, verifier_pb2.DecodeRequest(start=start))
    assert code == status
    assert says in details
    assert (await described(verifier)).sessions == 0


async def test_commands_out_of_order_are_refused(cluster: LocalCluster) -> None:
    verifier = cluster.processes["verifier-0"].address
    first = verifier_pb2.DecodeRequest(durable=3)
    assert (await refusal(verifier, first))[0] == grpc.StatusCode.INVALID_ARGUMENT
    start = verifier_pb2.DecodeRequest(start=await start_of(verifier, window=1))
    assert (await refusal(verifier, start, start))[0] == grpc.StatusCode.INVALID_ARGUMENT
    ahead = verifier_pb2.DecodeRequest(durable=99)
    code, details = await refusal(verifier, start, ahead)
    assert (code, "durable" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert (await described(verifier)).sessions == 0


async def test_an_older_or_equal_epoch_is_fenced_and_a_newer_one_takes_over(cluster: LocalCluster) -> None:
    verifier = cluster.processes["verifier-0"].address
    held = verifier_pb2.DecodeRequest(start=await start_of(verifier, window=1, epoch=5))
    first = asyncio.create_task(refusal(verifier, held))
    while (await described(verifier)).sessions == 0:
        await asyncio.sleep(0.01)
    for epoch in (4, 5):
        stale = verifier_pb2.DecodeRequest(start=await start_of(verifier, epoch=epoch))
        assert (await refusal(verifier, stale))[0] == grpc.StatusCode.ABORTED
    newer = verifier_pb2.DecodeRequest(start=await start_of(verifier, window=1, epoch=6))
    second = asyncio.create_task(refusal(verifier, newer))
    code, details = await first
    assert (code, "higher epoch" in details) == (grpc.StatusCode.ABORTED, True)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    async with asyncio.timeout(5):
        while (await described(verifier)).sessions:
            await asyncio.sleep(0.01)


async def draft(verifier: str, *frames: drafter_pb2.DraftUp, seconds: float = 0.5) -> list[drafter_pb2.DraftDown]:
    """What comes back on a Draft stream within a while. Raises when the verifier ends it."""

    async def say() -> AsyncIterator[drafter_pb2.DraftUp]:
        for frame in frames:
            yield frame
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            yield drafter_pb2.DraftUp(heartbeat=types_pb2.Heartbeat())

    heard = []
    async with open_channel(verifier) as channel:
        call = TreeSinkStub(channel).Draft(say())
        try:
            async with asyncio.timeout(seconds):
                async for frame in call:
                    heard.append(frame)  # noqa: PERF401 - what came before the timeout counts
        except TimeoutError:
            call.cancel()
    return heard


async def hello_to(verifier: str) -> drafter_pb2.DraftUp:
    description = await described(verifier)
    return drafter_pb2.DraftUp(
        hello=drafter_pb2.Hello(
            drafter_id="stranger",
            tokenizer_digest=description.tokenizer_digest,
            vocabulary=description.vocabulary,
        )
    )


async def test_a_draft_stream_begins_with_a_hello_of_the_same_tokenizer(cluster: LocalCluster) -> None:
    verifier = cluster.processes["verifier-0"].address
    with pytest.raises(grpc.aio.AioRpcError, match="hello"):
        await draft(verifier, drafter_pb2.DraftUp(heartbeat=types_pb2.Heartbeat()))
    foreign = drafter_pb2.DraftUp(hello=drafter_pb2.Hello(drafter_id="x", tokenizer_digest=b"y" * 16, vocabulary=4096))
    with pytest.raises(grpc.aio.AioRpcError, match="tokenizer_digest"):
        await draft(verifier, foreign)
    hello = await hello_to(verifier)
    with pytest.raises(grpc.aio.AioRpcError, match="not allowed"):
        await draft(verifier, hello, hello)


async def test_a_malformed_delta_detaches_its_session_alone_and_the_text_stays(
    cluster: LocalCluster, tokenizer: Tokenizer, prompts: list[str]
) -> None:
    verifier = cluster.processes["verifier-0"].address
    prompt = tokenizer.encode(prompts[0]).ids
    contract = Contract(seed=2, max_tokens=48, temperature=0.8)
    alone = await decode(verifier, prompt, contract)
    before = (await described(verifier)).refused_frames
    hello = await hello_to(verifier)
    answers = asyncio.gather(
        decode(verifier, prompt, contract, session="bad", pace=0.02),
        decode(verifier, prompt, contract, session="good", pace=0.02),
    )
    while (await described(verifier)).sessions < 2:
        await asyncio.sleep(0.005)
    subscriptions = [
        drafter_pb2.DraftUp(
            subscribe=drafter_pb2.Subscribe(
                session_id=name, epoch=1, attachment=number, ticket=await ticket(verifier, name, "stranger")
            )
        )
        for number, name in enumerate(("bad", "good"), 1)
    ]
    node: dict[str, Any] = {"first_id": 1, "parents": [0], "tokens": [1], "edges": b"a"}
    broken = [
        drafter_pb2.TreeDelta(epoch=1, attachment=1, **(node | {"tokens": [9999]})),
        drafter_pb2.TreeDelta(epoch=0, attachment=1, **node),
        drafter_pb2.TreeDelta(epoch=1, attachment=77, **node),
    ]
    deltas = [drafter_pb2.DraftUp(delta=delta) for delta in broken]
    heard = await draft(verifier, hello, *subscriptions, *deltas, seconds=0.7)
    closed = {frame.closed.attachment: frame.closed.reason for frame in heard if frame.WhichOneof("frame") == "closed"}
    assert "4095" in closed[1]
    assert closed.get(2, "finished") == "finished"
    commits = [frame.commit for frame in heard if frame.WhichOneof("frame") == "commit"]
    assert any(commit.attachment == 2 for commit in commits)
    assert [answer.tokens for answer in await answers] == [alone.tokens] * 2
    assert (await described(verifier)).refused_frames >= before + 3


async def test_a_subscription_to_nothing_is_closed_in_time(cluster: LocalCluster) -> None:
    verifier = cluster.processes["verifier-0"].address
    subscribe = drafter_pb2.DraftUp(subscribe=drafter_pb2.Subscribe(session_id="never", epoch=1, attachment=1))
    heard = await draft(verifier, await hello_to(verifier), subscribe, seconds=6.0)
    closed = [frame.closed.reason for frame in heard if frame.WhichOneof("frame") == "closed"]
    assert closed == ["unknown session"]
