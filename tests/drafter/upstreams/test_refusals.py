"""What an upstream answered is kept for the routers, as long as it holds, and never grows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.servicer import Capacity, DrafterServicer
from drafter_svc.upstreams import upstream_pool
from drafter_svc.upstreams.refusals import MAX_SESSIONS, UPSTREAM_ENDED, Refusals
from drafter_svc.upstreams.upstream import Attachment
from drafter_svc.upstreams.upstream_pool import UpstreamPool
from outrider.config import DrafterConfig
from outrider.core.session.speculation_status import MAX_DETAIL
from outrider.errors import InternalError, TokenizerMismatch, Unavailable
from outrider.rpc.liveness import WorkClock
from outrider.v1 import drafter_pb2 as pb

KEY = ("session", 1)


def test_a_refusal_holds_until_the_session_is_served() -> None:
    refusals = Refusals()
    refusals.closed(KEY, "forged ticket")
    assert refusals.attach_response(KEY).refused == "forged ticket"
    assert refusals.attach_response(("other", 1)).refused == ""
    assert refusals.attach_response(("session", 2)).refused == ""  # another epoch is another attempt
    refusals.opened(KEY)
    assert refusals.attach_response(KEY).refused == ""


def test_an_orderly_end_is_no_refusal() -> None:
    refusals = Refusals()
    for reason in ("finished", "fenced", "fenced: the session is at epoch 3", UPSTREAM_ENDED):
        refusals.closed(KEY, reason)
    assert refusals.attach_response(KEY).refused == ""


def test_every_session_gets_the_reason_of_an_upstream_that_refuses_all() -> None:
    refusals = Refusals()
    refusals.closed(KEY, "features: this upstream gives none")
    assert refusals.attach_response(("other", 1)).refused == "features: this upstream gives none"
    refusals.welcomed()
    refusals.failed(TokenizerMismatch("uses another tokenizer"))
    assert refusals.reason(attached=True) == refusals.attach_response(("other", 1)).refused == "uses another tokenizer"
    refusals.failed(Unavailable("connection refused"))  # the latest holds
    assert (refusals.reason(attached=True), refusals.attach_response(("other", 1)).unreachable) == (
        "connection refused",
    ) * 2
    assert refusals.attach_response(("other", 1)).refused == ""
    refusals.failed(TokenizerMismatch("uses another tokenizer"))
    assert refusals.attach_response(("other", 1)).unreachable == ""
    refusals.failed(InternalError("Internal error from Core"))  # gRPC's own, where a write met the refusal
    assert refusals.reason(attached=True) == "uses another tokenizer"
    refusals.welcomed()
    refusals.failed(InternalError("Internal error from Core"))
    assert refusals.attach_response(("other", 1)).unreachable == "Internal error from Core"
    refusals.welcomed()
    assert refusals.reason(attached=True) == ""


def test_an_upstream_that_no_session_needs_is_not_named_as_unreachable() -> None:
    refusals = Refusals()
    refusals.failed(Unavailable("connection refused"))
    assert refusals.reason(attached=False) == ""
    refusals.closed(KEY, "features: this upstream gives none")
    assert refusals.reason(attached=False) == "features: this upstream gives none"


class Idle:
    """Stands where a loop does: nothing is drafted."""

    def __init__(self) -> None:
        self.members: dict[Attachment, object] = {}
        self.progress = WorkClock()
        self.level_s = 0.0
        self.nodes = 0

    def closed(self, key: Attachment) -> None:
        """Nothing was begun."""


class Call:
    """Stands where the context of a call does."""

    def invocation_metadata(self) -> tuple[()]:
        return ()


@asynccontextmanager
async def reaching_no_upstream() -> AsyncIterator[DrafterServicer]:
    """A drafter whose upstreams are ports on which no server listens."""
    upstreams, idle = UpstreamPool(pb.Hello(vocabulary=100)), Idle()
    upstreams.serve(idle)  # type: ignore[arg-type]
    capacity = Capacity(b"digest", 100, 1000, 4, 0)
    drafter = DrafterServicer(DrafterConfig(model=Path()), "drafter-x", capacity, upstreams, idle)  # type: ignore[arg-type]
    try:
        yield drafter
    finally:
        await upstreams.close()


async def attach(drafter: DrafterServicer, upstream: str) -> pb.AttachResponse:
    call: Any = Call()
    return await drafter.Attach(pb.AttachRequest(session_id="session", epoch=1, upstream=upstream), call)


async def test_a_retried_session_is_refused_once() -> None:
    async with reaching_no_upstream() as drafter:
        await attach(drafter, "127.0.0.1:1")
        upstream = drafter.upstreams.upstreams["127.0.0.1:1"]
        upstream.refusals.closed(KEY, "unknown session")
        upstream.detach(upstream.attachments["session"])
        assert (await attach(drafter, "127.0.0.1:1")).refused == "unknown session"
        assert (await attach(drafter, "127.0.0.1:1")).refused == ""


def test_refusals_are_cut_and_their_number_is_bounded() -> None:
    refusals = Refusals()
    for number in range(10 * MAX_SESSIONS):
        refusals.closed((f"session {number}", 1), "x\n" * 10_000)
    assert len(refusals._sessions) == MAX_SESSIONS
    assert len(refusals.attach_response((f"session {10 * MAX_SESSIONS - 1}", 1)).refused) == MAX_DETAIL


async def test_an_idle_stream_is_used_again_and_others_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream_pool, "IDLE_S", -1.0)  # all are
    async with reaching_no_upstream() as drafter:
        await attach(drafter, "127.0.0.1:1")
        first = drafter.upstreams.upstreams["127.0.0.1:1"]
        first.detach(first.attachments["session"])
        await attach(drafter, "127.0.0.1:1")
        assert [*drafter.upstreams.upstreams.values()] == [first]
        await attach(drafter, "127.0.0.1:2")
        assert [*drafter.upstreams.upstreams] == ["127.0.0.1:2"]
