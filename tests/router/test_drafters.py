"""The drafters of a router: one that is of no use is replaced, and no text waits for it."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress

import pytest

from router.drafters import attached_drafters, drafter_assignment
from router.sessions import commit_pump
from tests.router.fakes import FakeDrafter, FakeVerifier, announced
from tests.router.rig import (
    MODEL,
    SCRIPT,
    ask,
    drain,
    running_router,
    until,
)


async def test_a_frozen_drafter_costs_no_time_and_is_replaced(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_drafters, "RPC_TIMEOUT_S", 1.0)
    monkeypatch.setattr(drafter_assignment, "REPLACE_AFTER_S", 0.1)
    verifier, frozen, good = FakeVerifier(SCRIPT, pace_s=0.1), FakeDrafter(frozen=True), FakeDrafter()
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(running_router(redis_url))
        await stack.enter_async_context(announced(verifier, rig.registry, MODEL.digest))
        await stack.enter_async_context(announced(frozen, rig.registry, MODEL.digest))
        second = await stack.enter_async_context(announced(good, rig.registry, MODEL.digest, sessions=3))
        began = time.monotonic()
        call = rig.stub.Generate(ask(max_tokens=50))
        session_id = (await call.read()).started.session_id
        await call.read()
        assert not good.attached  # the text did not wait for the drafters
        assert time.monotonic() - began < 5.0
        await until(lambda: session_id in good.attached)
        async with asyncio.timeout(10):  # with one of the next commits
            while (await rig.sessions.get(session_id)).drafters != (second.worker_id,):
                await call.read()
        call.cancel()
        await until(lambda: not good.attached)


async def test_drafters_are_attached_on_the_verifiers_demand_and_released_later(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_pump, "RELEASE_S", 0.5)
    verifier, drafter = FakeVerifier(SCRIPT, pace_s=0.06), FakeDrafter()
    verifier.resting = True
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(running_router(redis_url))
        await stack.enter_async_context(announced(verifier, rig.registry, MODEL.digest))
        await stack.enter_async_context(announced(drafter, rig.registry, MODEL.digest))
        call = rig.stub.Generate(ask(max_tokens=60))
        reader = asyncio.create_task(drain(call))
        await until(lambda: verifier.steps >= 5)
        assert not drafter.asked
        verifier.resting, verifier.drafters = False, 1
        await until(lambda: bool(drafter.attached))
        verifier.resting = True
        seen, asked = verifier.steps, drafter.asked
        await until(lambda: verifier.steps >= seen + 3)
        assert (bool(drafter.attached), drafter.asked) == (True, asked)
        await until(lambda: not drafter.attached)
        verifier.resting = False
        await until(lambda: bool(drafter.attached))
        call.cancel()
        with suppress(asyncio.CancelledError):
            await reader


async def test_a_drafter_that_never_subscribes_is_replaced(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_assignment, "REPLACE_AFTER_S", 0.05)
    verifier, first, second = FakeVerifier(SCRIPT, pace_s=0.05), FakeDrafter(), FakeDrafter()
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(running_router(redis_url))
        await stack.enter_async_context(announced(verifier, rig.registry, MODEL.digest))
        await stack.enter_async_context(announced(first, rig.registry, MODEL.digest))
        await stack.enter_async_context(announced(second, rig.registry, MODEL.digest, sessions=3))
        call = rig.stub.Generate(ask(max_tokens=50))
        reader = asyncio.create_task(drain(call))
        await until(lambda: bool(second.attached))
        await until(lambda: not first.attached)
        verifier.drafters = 1  # the second one has subscribed: it stays
        seen = verifier.steps
        await until(lambda: verifier.steps >= seen + 5)  # what was asked before the router saw it has been answered
        asked = second.asked
        await asyncio.sleep(0.3)
        assert (second.asked, bool(second.attached)) == (asked, True)
        call.cancel()
        with suppress(asyncio.CancelledError):
            await reader


async def test_a_drafter_that_brings_nothing_gives_way_to_one_of_another_kind_and_is_told_so(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_assignment, "POINTLESS_S", 0.1)
    monkeypatch.setattr(drafter_assignment, "REVIEW_S", 0.05)
    verifier = FakeVerifier(SCRIPT, pace_s=0.02)  # it accepts nothing, a token a step
    verifier.drafters = 1
    near, alike, far = FakeDrafter(), FakeDrafter(), FakeDrafter()
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(running_router(redis_url))
        await stack.enter_async_context(announced(verifier, rig.registry, MODEL.digest))
        for drafter, model, sessions in ((near, "small", 0), (alike, "small", 1), (far, "larger", 2)):
            entry = announced(drafter, rig.registry, MODEL.digest, model=model, sessions=sessions)
            await stack.enter_async_context(entry)
        call = rig.stub.Generate(ask(max_tokens=50))
        reader = asyncio.create_task(drain(call))
        await until(lambda: bool(near.attached))
        await until(lambda: bool(far.attached) and not near.attached)
        assert near.let_go == ["its drafts bring nothing"]
        verifier.stride, asked = 2, far.asked  # of its drafts one is accepted in each step
        await reader
        assert (near.asked, alike.asked, far.asked, far.let_go) == (1, 0, asked, [])
