"""9. Decode."""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.core.session.contract import Contract, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.rpc.channels import open_channel
from outrider.rpc.codec import contract_to_pb, plan_to_pb
from outrider.v1 import types_pb2, verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierStub
from tests.e2e.mini_router import described
from tests.e2e.protocol.conftest import Text
from tests.e2e.protocol.peers import calling, decoding, delta, drafting, idle, start_of
from tests.e2e.protocol.talk import new_name

pytestmark = pytest.mark.asyncio(loop_scope="session")

# The values of docs/protocol.md.
HALF_CLOSE_S = 5.0

DEEP = plan_to_pb(Plan(version=1, depth=64, width=4, nodes=64, wait_us=0))


async def test_the_sequence_from_start_to_the_end_of_the_call(verifier: str, text: Text) -> None:
    contract = types_pb2.Contract()
    contract.CopyFrom(text.contract)
    contract.max_tokens = 6
    async with decoding(verifier, tokens=text.prompt, contract=contract, window=3, epoch=4) as router:
        await router.generated(3)
        assert [kind for kind, _ in router.inbox.frames if kind != "heartbeat"] == ["started"] + ["commit"] * 3
        await router.acknowledge(3)
        finished = await router.inbox.take("finished")
        assert finished.reason == types_pb2.FINISH_REASON_LENGTH
        position = len(text.prompt)
        for commit in router.inbox.of("commit"):
            assert (commit.epoch, commit.position) == (4, position)
            position += len(commit.tokens)
            assert list(commit.tokens) == text.whole[commit.position : position]
            assert len(commit.gaps) == len(commit.tokens)
            assert min(commit.gaps) >= 0
            assert commit.digest == extend(EMPTY, text.whole[:position])
            assert commit.report.forward_us > 0
        assert router.tokens == text.whole[: len(text.prompt) + 6]
        await asyncio.sleep(0.3)
        assert router.inbox.open  # until the router has closed its side
        router.finish()
        assert (await router.inbox.end()).code is grpc.StatusCode.OK


async def test_a_stop_id_ends_the_generation_behind_it(verifier: str, text: Text) -> None:
    contract = types_pb2.Contract()
    contract.CopyFrom(text.contract)
    contract.stop_ids.append(text.answer[5])
    first = text.answer.index(text.answer[5])
    async with (
        decoding(verifier, tokens=text.prompt, contract=contract, window=1, plan=DEEP) as router,
        drafting(verifier) as oracle,
    ):
        await router.generated(1)
        await oracle.attach(router.session)
        oracle.send_frame(**delta(text.whole, len(text.prompt), text.answer[1:20]))  # whatever is drafted behind it
        await oracle.received_all(router.session)
        while not router.inbox.of("finished"):
            router.send_frame(durable=len(router.tokens))
            await asyncio.sleep(0.02)
        assert router.tokens == text.whole[: len(text.prompt) + first + 1]
        assert (await router.inbox.take("finished")).reason == types_pb2.FINISH_REASON_STOP


async def test_never_more_than_the_window_is_committed_beyond_the_durable_position_whatever_the_tree(
    verifier: str, text: Text
) -> None:
    async with (
        decoding(verifier, tokens=text.prompt, contract=text.contract, window=4, plan=DEEP) as router,
        drafting(verifier) as oracle,
    ):
        await router.full()
        await oracle.attach(router.session)
        oracle.send_frame(**delta(text.whole, len(text.prompt) + 3, text.answer[4:84]))
        await oracle.received_all(router.session)
        for durable in (4, 5, 7, 7, 6, 11, 12, 16, 20, 22, 26):  # also nothing new, and less than it knew
            await router.full()
            router.send_frame(durable=len(text.prompt) + durable)
            await router.full()
            await asyncio.sleep(0.03)
            assert len(router.tokens) == router.durable + 4
        assert router.tokens == text.whole[: len(router.tokens)]
        assert sum(report.accepted for report in router.reports) > 4
        assert max(report.accepted for report in router.reports) <= 3


async def test_a_verifier_reports_how_much_kv_of_the_tokens_it_has(verifier: str, text: Text) -> None:
    prompt = text.prompt[::-1]  # that no other test asks for
    opening = {"contract": text.contract, "window": 20}
    async with decoding(verifier, tokens=prompt, **opening) as router:
        assert (await router.inbox.take("started")).cached == 0
        await router.generated(20)
        tokens = router.tokens
        router.finish()
        assert (await router.inbox.end()).code is grpc.StatusCode.OK  # a router may give up at any time
    further = {"session_id": new_name(), "answer_position": len(prompt)}
    async with decoding(verifier, tokens=tokens, **opening | further) as router:
        assert (await router.inbox.take("started")).cached == len(tokens) - 1
    async with decoding(verifier, tokens=tokens, **opening | further | {"tenant": "another"}) as router:
        assert (await router.inbox.take("started")).cached == 0


@pytest.mark.parametrize("how", ["cancel", "close", "break"])
async def test_the_end_of_a_call_stops_it_within_the_step_and_the_kv_stays(verifier: str, text: Text, how: str) -> None:
    prompt = text.prompt[5:]
    async with decoding(verifier, tokens=prompt, contract=text.contract, window=300) as router:
        await router.generated(10)
        tokens = router.tokens
        began = time.monotonic()
        if how == "cancel":
            router.send_frame(cancel=verifier_pb2.CancelDecode())
            assert (await router.inbox.end()).code is grpc.StatusCode.OK
        elif how == "close":
            router.finish()
            assert (await router.inbox.end()).code is grpc.StatusCode.OK
        assert not router.inbox.of("finished")
    there = await idle(verifier)
    assert time.monotonic() - began < 0.5
    await asyncio.sleep(0.2)
    assert (await described(verifier)).steps <= there.steps + 1  # the one that ran
    assert there.warm > 0
    again = {"session_id": router.session, "epoch": 2, "answer_position": len(prompt)}
    async with decoding(verifier, tokens=tokens, contract=text.contract, window=1, **again) as router:
        assert (await router.inbox.take("started")).cached == len(tokens) - 1


async def test_a_router_that_does_not_close_its_side_after_the_end_is_cut_off(verifier: str) -> None:
    start = await start_of(verifier, contract=contract_to_pb(Contract(seed=1, max_tokens=1)), lease_ms=10_000)
    async with calling(verifier, start) as router:
        router.beats = False  # one that met the end would fail the call, in gRPC's words
        await router.inbox.take("finished")
        began = time.monotonic()
        end = await router.inbox.end(within_s=HALF_CLOSE_S + 2)
        assert HALF_CLOSE_S - 0.5 < time.monotonic() - began < HALF_CLOSE_S + 1
        assert (end.code, "close its side" in end.details) == (grpc.StatusCode.UNAVAILABLE, True)


async def test_commands_out_of_order_are_refused(verifier: str, text: Text) -> None:
    good = await start_of(verifier, tokens=text.prompt, contract=text.contract, window=1)
    for commands, details in (
        (({"durable": 3},), "first message"),
        (({"heartbeat": types_pb2.Heartbeat()},), "first message"),
        (({},), "first message"),
        (({"start": good}, {"start": good}), "'start' is not allowed"),
        (({"start": good}, {}), "command"),
        (({"start": good}, {"durable": len(text.prompt) + 2}), "durable"),
        (({"start": good}, {"plan": types_pb2.Plan(version=9, depth=65)}), "plan.depth"),
    ):
        async with calling(verifier) as router:
            router.beats = False  # one that met the end would fail the call, in gRPC's words
            for command in commands:
                router.send_frame(**command)
            end = await router.inbox.end()
            assert (end.code, details in end.details) == (grpc.StatusCode.INVALID_ARGUMENT, True), end
            assert end.metadata["outrider-error"] == "InvalidRequest"
    async with calling(verifier) as router:
        router.finish()
        assert (await router.inbox.end()).code is grpc.StatusCode.INVALID_ARGUMENT
    await idle(verifier)


def absurd(**changes: Any) -> types_pb2.Contract:
    """A good contract, with changes."""
    contract = contract_to_pb(Contract(seed=1, max_tokens=4))
    for name, value in changes.items():
        if isinstance(value, list):
            getattr(contract, name).extend(value)
        else:
            setattr(contract, name, value)
    return contract


@pytest.mark.parametrize(
    ("changes", "code", "details"),
    [
        ({"model": "gpt"}, grpc.StatusCode.NOT_FOUND, "target"),
        ({"tokenizer_digest": b"x" * 16}, grpc.StatusCode.FAILED_PRECONDITION, "tokenizer_digest"),
        ({"tokens": []}, grpc.StatusCode.INVALID_ARGUMENT, "tokens"),
        ({"tokens": [1, 2, 4096]}, grpc.StatusCode.INVALID_ARGUMENT, "4095"),
        ({"digest": 7}, grpc.StatusCode.INVALID_ARGUMENT, "digest"),
        ({"answer_position": 4}, grpc.StatusCode.INVALID_ARGUMENT, "answer_position"),
        ({"answer_position": 0, "contract": absurd(max_tokens=3)}, grpc.StatusCode.INVALID_ARGUMENT, "one more token"),
        ({"window": 0}, grpc.StatusCode.INVALID_ARGUMENT, "window"),
        ({"window": 2**31}, grpc.StatusCode.INVALID_ARGUMENT, "window"),
        ({"lease_ms": 0}, grpc.StatusCode.INVALID_ARGUMENT, "lease_ms"),
        ({"contract": absurd(max_tokens=1022)}, grpc.StatusCode.INVALID_ARGUMENT, "1024"),
        ({"contract": absurd(temperature=-1)}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ({"contract": absurd(top_p=7)}, grpc.StatusCode.INVALID_ARGUMENT, "top_p"),
        ({"contract": absurd(rule="guess")}, grpc.StatusCode.INVALID_ARGUMENT, "shared-noise"),
        ({"contract": absurd(stop_ids=[4096])}, grpc.StatusCode.INVALID_ARGUMENT, "stop_ids"),
        ({"contract": absurd(logprobs=21)}, grpc.StatusCode.INVALID_ARGUMENT, "logprobs"),
        ({"plan": types_pb2.Plan(depth=65)}, grpc.StatusCode.INVALID_ARGUMENT, "plan.depth"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
async def test_a_wrong_start_is_refused_by_its_field(
    verifier: str, changes: dict[str, Any], code: grpc.StatusCode, details: str
) -> None:
    async with calling(verifier, await start_of(verifier, **changes)) as router:
        end = await router.inbox.end()
    assert (end.code, details in end.details) == (code, True), end
    await idle(verifier)


async def test_a_session_more_than_there_are_slots_is_refused_with_a_time_to_come_back(verifier: str) -> None:
    async with AsyncExitStack() as stack:
        for _ in range((await idle(verifier)).slots):
            await stack.enter_async_context(decoding(verifier, window=1))
        late = await stack.enter_async_context(calling(verifier, await start_of(verifier)))
        end = await late.inbox.end()
        assert end.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(end.metadata["retry-after-ms"]) > 0


async def test_a_start_waits_a_moment_for_a_slot_that_is_about_to_be_given_back(verifier: str) -> None:
    async with AsyncExitStack() as stack:
        slots = (await idle(verifier)).slots
        routers = [await stack.enter_async_context(decoding(verifier, window=1)) for _ in range(slots)]
        late = await stack.enter_async_context(calling(verifier, await start_of(verifier)))
        routers[0].finish()
        await late.inbox.take("started")


async def test_a_text_that_was_read_beforehand_is_found_by_the_session_that_comes(verifier: str, text: Text) -> None:
    async with asyncio.timeout(10):
        while (there := await described(verifier)).sessions:  # of the test before; their ends are under way
            await asyncio.sleep(0.01)
    request = verifier_pb2.WarmRequest(
        model=there.model, tokenizer_digest=there.tokenizer_digest, tokens=text.whole, tenant=new_name()
    )
    async with open_channel(verifier) as channel:
        warm = VerifierStub(channel).Warm
        assert (await warm(request)).cached == len(text.whole) - 1
        steps = (await described(verifier)).steps
        assert (await warm(request)).cached == len(text.whole) - 1  # repeating it reads nothing
        assert (await described(verifier)).steps == steps
        assert (await described(verifier)).sessions == 0
        for tenant, cached in ((request.tenant, len(text.prompt) - 1), (new_name(), 0)):  # nor is it shared with others
            async with decoding(verifier, tokens=text.prompt, contract=text.contract, tenant=tenant) as router:
                assert (await router.inbox.take("started")).cached == cached
        for changes, code in (
            ({"model": "gpt"}, grpc.StatusCode.NOT_FOUND),
            ({"tokens": []}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"tokens": [4096]}, grpc.StatusCode.INVALID_ARGUMENT),
            ({"tokens": [5] * 1025}, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            wrong = verifier_pb2.WarmRequest(
                **{"model": there.model, "tokenizer_digest": there.tokenizer_digest, "tokens": [5], **changes}
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await warm(wrong)
            assert caught.value.code() is code
