"""Why is it not speculating? The router reports it for every generation, whatever its neighbours answer."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from outrider.core.session.speculation_status import MAX_DETAIL
from outrider.v1 import types_pb2
from router.drafters import attached_drafters, drafter_assignment
from tests.router.fakes import FakeDrafter, FakeVerifier, announced
from tests.router.rig import MODEL, SCRIPT, ask, collect, running_router

Reason = types_pb2.SpeculationReason


async def speculation(
    redis_url: str, verifier: FakeVerifier, drafter: FakeDrafter | None = None, more: Any = None, **options: Any
) -> types_pb2.SpeculationStatus:
    """Of one answer."""
    verifier.verified = 0
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(running_router(redis_url, **options))
        await stack.enter_async_context(announced(verifier, rig.registry, MODEL.digest, **(more or {})))
        if drafter is not None:
            await stack.enter_async_context(announced(drafter, rig.registry, MODEL.digest))
        _, _, finished = await collect(rig.stub.Generate(ask(max_tokens=30)))
    return finished.usage.speculation


async def test_the_figures_of_drafters_that_rest_reach_the_client(redis_url: str) -> None:
    verifier = FakeVerifier(SCRIPT)
    verifier.drafters, verifier.rates = 1, (71_000, 65_500)
    found = await speculation(redis_url, verifier, FakeDrafter())
    assert Reason.Name(found.reason) == "SPECULATION_REASON_RESTING"
    assert (found.steps, found.plain_rate, found.drafted_rate) == (30, 71_000, 65_500)


@pytest.mark.parametrize(
    ("options", "detail"),
    [({"policy": "off"}, "policy = off"), ({"drafters_per_session": 0}, "drafters_per_session = 0")],
)
async def test_the_router_setting_that_disables_speculation_is_named(
    redis_url: str, options: dict[str, Any], detail: str
) -> None:
    found = await speculation(redis_url, FakeVerifier(SCRIPT), FakeDrafter(), **options)
    assert (Reason.Name(found.reason), found.detail) == ("SPECULATION_REASON_OFF_BY_ROUTER", detail)


async def test_a_model_that_verifies_no_trees_has_the_reason_reported(redis_url: str) -> None:
    why = {"treeless": True, "treeless_why": "it keeps a state"}
    found = await speculation(redis_url, FakeVerifier(SCRIPT), FakeDrafter(), why)
    assert (Reason.Name(found.reason), found.detail) == ("SPECULATION_REASON_TREELESS", "target: it keeps a state")


async def test_a_drafter_that_does_not_answer_is_unreachable(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_drafters, "RPC_TIMEOUT_S", 0.05)
    found = await speculation(redis_url, FakeVerifier(SCRIPT, pace_s=0.01), FakeDrafter(frozen=True))
    assert Reason.Name(found.reason) == "SPECULATION_REASON_UNREACHABLE"


async def test_the_answer_to_a_drafter_is_queried_soon_and_cut(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_assignment, "QUERY_AFTER_S", 0.05)
    monkeypatch.setattr(drafter_assignment, "REPLACE_AFTER_S", 60.0)  # it is not asked to come again
    drafter = FakeDrafter()

    class Later(FakeVerifier):
        async def rest(self) -> None:
            if drafter.attached:
                drafter.answer.refused = "not \x1b[31m you " + "!" * 5000
            await super().rest()

    found = await speculation(redis_url, Later(SCRIPT, pace_s=0.01), drafter)
    assert Reason.Name(found.reason) == "SPECULATION_REASON_REFUSED"
    assert found.detail.startswith("drafter 127.0.0.1:")
    assert ": not  [31m you !!!" in found.detail
    assert len(found.detail) == MAX_DETAIL
    assert drafter.asked == 2


async def test_the_upper_of_two_refused_tiers_is_reported(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_assignment, "QUERY_AFTER_S", 0.05)
    upper, lower = FakeDrafter(), FakeDrafter()
    upper.answer.refused, lower.answer.refused = "forged ticket", "unknown session"
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(running_router(redis_url))
        verifier = FakeVerifier(SCRIPT, pace_s=0.01)
        verifier.verified = 0
        await stack.enter_async_context(announced(verifier, rig.registry, MODEL.digest))
        await stack.enter_async_context(announced(upper, rig.registry, MODEL.digest, serves=True))
        await stack.enter_async_context(announced(lower, rig.registry, MODEL.digest, tier=1, above=0))
        _, _, finished = await collect(rig.stub.Generate(ask(max_tokens=30)))
    assert lower.asked > 0
    assert finished.usage.speculation.detail.endswith(": forged ticket")
