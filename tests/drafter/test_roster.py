"""A drafter drafts for a session's latest owner, and releases all sessions when it goes down."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from drafter_svc.servicer import Capacity, DrafterServicer
from drafter_svc.upstreams.upstream import Attachment
from drafter_svc.upstreams.upstream_pool import UpstreamPool
from outrider.config import DrafterConfig
from outrider.rpc.liveness import WorkClock
from outrider.v1 import drafter_pb2 as pb

UPSTREAM, OTHER = "127.0.0.1:1", "127.0.0.1:2"  # no server listens there
SLOTS = 2


class Loop:
    """Stands where a loop does: nothing is drafted."""

    def __init__(self) -> None:
        self.members: dict[Attachment, object] = {}
        self.progress = WorkClock()
        self.level_s = 0.0
        self.nodes = 0
        self.let_go: list[tuple[str, int]] = []

    def closed(self, key: Attachment) -> None:
        self.let_go.append(key.key)


class Refused(Exception):
    """How the call ended."""


class Call:
    """Stands where the context of a call does."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: Any, details: str, trailing: Any = ()) -> None:
        raise Refused(details)


class Rig:
    def __init__(self) -> None:
        self.loop = Loop()
        upstreams = UpstreamPool(pb.Hello(vocabulary=100))
        upstreams.serve(self.loop)  # type: ignore[arg-type]
        capacity, loop = Capacity(b"digest", 100, 1000, SLOTS, 0), self.loop
        self.servicer = DrafterServicer(DrafterConfig(model=Path()), "drafter-x", capacity, upstreams, loop)  # type: ignore[arg-type]

    async def attach(self, epoch: int, *, session: str = "s", upstream: str = UPSTREAM, ticket: bytes = b"") -> None:
        request = pb.AttachRequest(session_id=session, epoch=epoch, upstream=upstream, ticket=ticket)
        call: Any = Call()
        await self.servicer.Attach(request, call)

    async def detach(self, epoch: int) -> None:
        call: Any = Call()
        await self.servicer.Detach(pb.DetachRequest(session_id="s", epoch=epoch), call)

    @property
    def attached(self) -> list[tuple[str, str, int, bytes]]:
        """Where, for which session, under which epoch and ticket."""
        return [
            (upstream.address, attachment.session_id, attachment.epoch, attachment.ticket)
            for upstream in self.servicer.upstreams.upstreams.values()
            for attachment in upstream.attachments.values()
        ]


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.servicer.upstreams.close()


async def test_a_higher_epoch_replaces_and_an_older_one_changes_nothing(rig: Rig) -> None:
    await rig.attach(2, ticket=b"two")
    await rig.attach(1, upstream=OTHER, ticket=b"one")
    assert rig.attached == [(UPSTREAM, "s", 2, b"two")]
    await rig.attach(3, upstream=OTHER, ticket=b"three")
    assert rig.attached == [(OTHER, "s", 3, b"three")]
    assert rig.loop.let_go.count(("s", 2)) >= 1
    await rig.detach(2)
    assert rig.attached == [(OTHER, "s", 3, b"three")]
    await rig.detach(3)
    assert rig.attached == []


async def test_a_repeated_attach_brings_a_new_ticket(rig: Rig) -> None:
    await rig.attach(1, ticket=b"old")
    await rig.attach(1, ticket=b"new")
    assert rig.attached == [(UPSTREAM, "s", 1, b"new")]
    assert ("s", 1) not in rig.loop.let_go


async def test_a_session_beyond_the_slots_is_refused(rig: Rig) -> None:
    for number in range(SLOTS):
        await rig.attach(1, session=str(number))
    with pytest.raises(Refused, match="slots of this drafter are in use"):
        await rig.attach(1, session="one more")
    assert len(rig.attached) == SLOTS


async def test_a_draining_drafter_detaches_all_sessions_and_takes_no_more(rig: Rig) -> None:
    await rig.attach(1)
    rig.servicer.begin_drain()
    assert rig.attached == []
    assert rig.loop.let_go[-1] == ("s", 1)
    assert rig.servicer.describe("").draining
    with pytest.raises(Refused, match="this drafter is going down"):
        await rig.attach(2)
    assert rig.attached == []
