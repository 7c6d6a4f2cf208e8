"""9. Decode."""

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.core.session.contract import Contract, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.rpc.channels import open_channel
from outrider.v1 import types_pb2, verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierStub
from outrider.wire.types import contract_to_pb, plan_to_pb
from tests.e2e.mini_router import described
from tests.e2e.protocol.conftest import Text
from tests.e2e.protocol.peers import calling, decoding, delta, drafting, idle, start_of
from tests.e2e.protocol.stream_probe import new_name

pytestmark = pytest.mark.asyncio(loop_scope="session")

DEEP = plan_to_pb(Plan(version=1, depth=64, width=4, nodes=64, wait_us=0))


async def test_the_decoding_call_follows_the_sequence_from_start_to_its_end(verifier: str, text: Text) -> None:
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
        assert router.inbox.open  # for other generations
        router.finish()
        assert (await router.inbox.end()).code is grpc.StatusCode.OK


async def test_a_generation_ends_after_its_stop_id(verifier: str, text: Text) -> None:
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


async def test_a_verifier_commits_at_most_the_window_beyond_the_durable_position(verifier: str, text: Text) -> None:
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


async def test_a_verifier_reports_how_many_tokens_its_kv_covers(verifier: str, text: Text) -> None:
    prompt = text.prompt[::-1]  # no other test has this prompt
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
async def test_the_end_of_a_call_stops_decoding_within_a_step_and_keeps_the_kv(
    verifier: str, text: Text, how: str
) -> None:
    prompt = text.prompt[5:]
    async with decoding(verifier, tokens=prompt, contract=text.contract, window=300) as router:
        await router.generated(10)
        tokens = router.tokens
        began = time.monotonic()
        if how == "cancel":
            router.send_frame(cancel=True)
            await idle(verifier)
            assert router.inbox.open
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


async def test_generations_of_a_stream_share_messages_and_end_separately(verifier: str, text: Text) -> None:
    starts = [
        await start_of(verifier, tokens=text.prompt, contract=text.contract, window=8, handle=handle)
        for handle in (1, 2, 3)
    ]
    wrong = await start_of(verifier, tokens=[4096], handle=7)
    async with calling(verifier) as router:
        messages: list[verifier_pb2.DecodeResponse] = []
        router.inbox.put = messages.append  # type: ignore[method-assign]
        for start in (*starts, wrong):
            router.send_frame(start)

        async def until(handles: set[int], length: int) -> None:
            async with asyncio.timeout(10):
                while True:
                    counts = Counter(commit.handle for message in messages for commit in message.commits)
                    if all(counts[handle] == length for handle in handles):
                        return
                    await asyncio.sleep(0.01)

        await until({1, 2, 3}, 8)
        ends = [ended for message in messages for ended in message.ended]
        assert [(ended.handle, ended.error.kind, ended.error.field) for ended in ends] == [
            (7, "InvalidRequest", "tokens")
        ]
        durable = [len(text.prompt) + 8] * 3
        router.send(verifier_pb2.DecodeRequest(cancelled=[1, 99], acknowledged=[2, 3, 98], durable=durable))
        await until({2, 3}, 16)
        router.send(verifier_pb2.DecodeRequest(acknowledged=[2], durable=[2**63]))  # of one generation, which ends
        router.send(verifier_pb2.DecodeRequest(acknowledged=[3], durable=[len(text.prompt) + 16]))
        await until({3}, 24)
        (ended,) = messages[-1].ended or [ended for message in messages for ended in message.ended][1:]
        assert (ended.handle, ended.error.kind, ended.error.field) == (2, "InvalidRequest", "durable")
        together = [len({commit.handle for commit in message.commits}) for message in messages]
        assert max(together) >= 2  # 2 and 3 go on together; their prompts may have been read one after the other
        for handle in (1, 2, 3):
            commits = [commit for message in messages for commit in message.commits if commit.handle == handle]
            tokens = [token for commit in commits for token in commit.tokens]
            assert tokens == text.answer[: len(tokens)]
        assert router.inbox.open
    await idle(verifier)


async def test_messages_that_are_no_generation_s_end_the_stream(verifier: str, text: Text) -> None:
    good = await start_of(verifier, tokens=text.prompt, contract=text.contract, window=1)
    nameless = await start_of(verifier, handle=0)
    request = verifier_pb2.DecodeRequest
    for messages, details in (
        ((request(start=good), request(start=good)), "handle"),
        ((request(start=nameless),), "handle"),
        ((request(start=good), request(acknowledged=[1, 2], durable=[3])), "durable"),
    ):
        async with calling(verifier) as router:
            for message in messages:
                router.send(message)
            end = await router.inbox.end()
            assert (end.code, details in end.details) == (grpc.StatusCode.INVALID_ARGUMENT, True), end
            assert end.metadata["outrider-error"] == "InvalidRequest"
        await idle(verifier)


async def test_a_malformed_frame_ends_its_generation(verifier: str, text: Text) -> None:
    good = await start_of(verifier, tokens=text.prompt, contract=text.contract, window=1)
    for message, details in (
        ({"durable": len(text.prompt) + 2}, "durable"),
        ({"plan": types_pb2.Plan(version=9, depth=65)}, "plan.depth"),
    ):
        async with calling(verifier, good) as router:
            await router.inbox.take("started")
            router.send_frame(**message)  # type: ignore[arg-type]
            end = await router.inbox.end()
            assert (end.code, details in end.details) == (grpc.StatusCode.INVALID_ARGUMENT, True), end
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


async def test_a_session_beyond_the_slots_is_refused_with_a_retry_time(verifier: str) -> None:
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


async def test_a_session_uses_the_kv_of_a_prefilled_text(verifier: str, text: Text) -> None:
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
