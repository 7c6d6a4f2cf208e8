"""Rates of calls: what is over its rate is refused before anything is done for it, whatever it sends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.limits import rate_limits, slow_refusals
from outrider.limits.token_buckets import TokenBuckets
from outrider.store.api_keys import Keys
from outrider.v1 import inference_pb2 as pb
from tests.router.fakes import FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, Rig, ask, collect, running_router

BAD = pb.GenerateRequest(text="x", sampling=pb.Sampling(temperature=-1))


async def refusal(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), str(caught.value.details())


async def test_a_request_over_its_rate_is_not_even_read(redis_url: str) -> None:
    async with (
        running_router(redis_url, tenant_requests_per_s=0.001) as rig,
        announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest),
    ):
        code, _ = await refusal(collect(rig.stub.Generate(BAD)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT  # the first is within the rate
        code, problem = await refusal(collect(rig.stub.Generate(BAD)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "this tenant is over its rate (tenant_requests_per_s)" in problem


OTHERS: list[Callable[[Rig], Awaitable[Any]]] = [
    lambda rig: rig.stub.CreateSession(pb.CreateSessionRequest()),
    lambda rig: rig.stub.GetSession(pb.GetSessionRequest(session_id="s")),
    lambda rig: rig.stub.Watch(pb.WatchSessionRequest(session_id="s")).read(),
    lambda rig: rig.stub.ListModels(pb.ListModelsRequest()),
]


@pytest.mark.parametrize("call", OTHERS)
async def test_calls_of_other_kinds_are_counted_apart_from_generations(
    redis_url: str, call: Callable[[Rig], Awaitable[Any]]
) -> None:
    async with (
        running_router(redis_url, tenant_requests_per_s=0.001) as rig,
        announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest),
    ):
        await collect(rig.stub.Generate(ask(max_tokens=2)))
        await rig.stub.CreateSession(pb.CreateSessionRequest())
        code, problem = await refusal(call(rig))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "tenant_requests_per_s" in problem
        await refusal(rig.stub.Cancel(pb.CancelRequest(session_id="s")))  # is never over a rate
        code, _ = await refusal(rig.stub.Cancel(pb.CancelRequest(session_id="s")))
        assert code is grpc.StatusCode.NOT_FOUND


async def test_checks_of_a_key_have_a_rate_of_their_own(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "CHECKS_PER_S", 0.01)  # one of these may come at once
    async with running_router(redis_url, tenant_requests_per_s=0.001) as rig:
        await rig.stub.ListModels(pb.ListModelsRequest())
        await refusal(rig.stub.ListModels(pb.ListModelsRequest()))
        await rig.stub.CheckKey(pb.CheckKeyRequest())
        code, problem = await refusal(rig.stub.CheckKey(pb.CheckKeyRequest()))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "(tenant_requests_per_s)" in problem


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each caller one refusal is quick, one is held for longer than the test takes, and further ones are quick."""
    monkeypatch.setattr(slow_refusals, "QUICK_PER_S", 1e-3)
    monkeypatch.setattr(slow_refusals, "MAX_HELD_OF_KEY", 1)
    monkeypatch.setattr(slow_refusals, "pause", asyncio.Event().wait)


async def slowed(call: Callable[[], Awaitable[Any]], status: grpc.StatusCode) -> None:
    """Of four calls that are refused, three are answered, whatever their order, and one is held."""
    calls = {asyncio.ensure_future(refusal(call())) for _ in range(4)}
    answered = [await done for done in itertools.islice(asyncio.as_completed(calls), 3)]
    assert [code for code, _ in answered] == [status] * 3
    for _ in range(3):
        await refusal(call())
    (held,) = [waiting for waiting in calls if not waiting.done()]
    held.cancel()


async def test_a_tenant_over_its_rate_is_refused_slowly(redis_url: str, slow: None) -> None:
    async with running_router(redis_url, tenant_requests_per_s=0.001) as rig:
        await rig.stub.ListModels(pb.ListModelsRequest())
        await slowed(lambda: rig.stub.ListModels(pb.ListModelsRequest()), grpc.StatusCode.RESOURCE_EXHAUSTED)


async def test_a_stranger_is_refused_slowly(redis_url: str, slow: None) -> None:
    async with running_router(redis_url, auth="keys") as rig:
        await slowed(lambda: rig.stub.ListModels(pb.ListModelsRequest()), grpc.StatusCode.UNAUTHENTICATED)
        for _ in range(4):  # a gateway waits for the answers
            await refusal(rig.stub.CheckKey(pb.CheckKeyRequest()))


async def test_calls_that_end_something_are_held_over_their_rate_and_served(
    redis_url: str, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "ENDINGS_PER_S", 0.01)  # one of these may come at once
    async with running_router(redis_url, tenant_requests_per_s=0.01) as rig:
        cancel = pb.CancelRequest(session_id="s")
        assert (await refusal(rig.stub.Cancel(cancel)))[0] is grpc.StatusCode.NOT_FOUND
        await slowed(lambda: rig.stub.Cancel(cancel), grpc.StatusCode.NOT_FOUND)


async def test_an_address_checks_keys_at_its_rate(redis_url: str) -> None:
    async with running_router(redis_url, auth="keys", address_requests_per_s=0.001) as rig:
        key = (("authorization", f"Bearer {(await Keys(rig.client).add('one'))[0]}"),)
        assert (await rig.stub.CheckKey(pb.CheckKeyRequest(), metadata=key)).tenant == "one"
        code, problem = await refusal(rig.stub.CheckKey(pb.CheckKeyRequest(), metadata=key))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "address_requests_per_s" in problem


async def test_resuming_counts_as_generating_and_needs_no_rate_of_tokens(redis_url: str) -> None:
    async with (
        running_router(redis_url, tenant_requests_per_s=2.0, tenant_tokens_per_min=2) as rig,
        announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest),
    ):
        started, *_ = await collect(rig.stub.Generate(ask(max_tokens=2)))  # more tokens than the rate allows
        again = pb.ResumeRequest(session_id=started.session_id)
        _, chunks, _ = await collect(rig.stub.Resume(again))
        assert [token for chunk in chunks for token in chunk.token_ids] == SCRIPT[:2]
        code, problem = await refusal(collect(rig.stub.Generate(ask(max_tokens=2))))
        assert (code, "tenant_tokens_per_min" in problem) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        refused = [await refusal(collect(rig.stub.Resume(again))) for _ in range(1)]
        assert refused[0][0] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_replayed_tokens_use_up_the_rate_and_leave_no_debt(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(per_s: float, capacity: float, clock: object) -> TokenBuckets:
        return TokenBuckets(per_s, capacity, lambda: 0.0)

    monkeypatch.setattr(rate_limits, "TokenBuckets", make)  # nothing is refilled, however long the test takes
    async with (
        running_router(redis_url, tenant_tokens_per_min=30) as rig,
        announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest),
    ):
        started, chunks, _ = await collect(rig.stub.Generate(ask(max_tokens=4)))
        again = pb.ResumeRequest(session_id=started.session_id)
        end = pb.ResumeRequest(session_id=started.session_id, next_position=chunks[-1].next_position)
        for _ in range(12):
            await collect(rig.stub.Resume(end))  # from where the client stands, nothing is sent again
        await collect(rig.stub.Generate(ask(max_tokens=1)))
        for _ in range(12):
            _, chunks, _ = await collect(rig.stub.Resume(again))
            assert sum(len(chunk.token_ids) for chunk in chunks) == 4
        code, problem = await refusal(collect(rig.stub.Generate(ask(max_tokens=1))))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "this tenant is over its rate (tenant_tokens_per_min); retry in 2.0 s" in problem


async def test_an_address_over_its_rate_is_refused_before_its_key_is_looked_up(redis_url: str) -> None:
    async with running_router(redis_url, auth="keys", address_requests_per_s=0.001) as rig:
        code, _ = await refusal(rig.stub.ListModels(pb.ListModelsRequest()))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        code, problem = await refusal(rig.stub.ListModels(pb.ListModelsRequest()))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "this address is over its rate (address_requests_per_s)" in problem


async def test_the_number_of_messages_is_bounded(redis_url: str) -> None:
    async with (
        running_router(redis_url) as rig,
        announced(FakeVerifier(SCRIPT), rig.registry, MODEL.digest),
    ):
        request = pb.GenerateRequest(messages=[pb.Message(role="user")] * 4097)
        code, problem = await refusal(collect(rig.stub.Generate(request)))
        assert (code, problem) == (grpc.StatusCode.INVALID_ARGUMENT, "messages: are 4097, must be at most 4096")
