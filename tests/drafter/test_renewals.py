"""A session whose frames are of no use is asked for anew, but not without end: then its router gets the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from drafter_svc.ngram_drafter import NgramScheduler
from drafter_svc.upstreams import upstream as upstreams
from drafter_svc.upstreams.upstream import MAX_RENEWALS, Attachment, Upstream
from outrider.core.proposers.lookup import Lookups
from outrider.core.session.contract import Contract, Plan
from outrider.v1 import drafter_pb2 as pb
from outrider.wire.types import contract_to_pb, plan_to_pb
from tests.drafter.fake_stream import FakeStream


class Rig:
    """A drafter's stream that is open, with one session; the upstream's frames are put in here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused = 0
        self.attachment = Attachment("s", "", 1, b"")
        self.stream = FakeStream(monkeypatch)
        self.scheduler = NgramScheduler(Lookups("suffix", None), slots=1, send=lambda *_: None, resync=self._resync)
        self.upstream = Upstream("127.0.0.1:1", pb.Hello(vocabulary=16), self.scheduler, self._refuse)
        self._running = asyncio.create_task(self.scheduler.run())

    async def open(self) -> None:
        self.upstream.attach(self.attachment)
        await self.stream.settle()

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.wait({self._running})
        await self.upstream.close()

    @property
    def sent(self) -> list[str | list[int]]:
        """The messages that went out behind the greeting: a frame's kind, or the attachments of deltas."""
        assert self.stream.sent[0].WhichOneof("frame") == "hello"
        return [
            [delta.attachment for delta in message.deltas] or (message.WhichOneof("frame") or "")
            for message in self.stream.sent[1:]
        ]

    async def drift(self) -> None:
        """A snapshot comes that is well formed, and whose digest is another text's."""
        snapshot = pb.Snapshot(
            attachment=self.attachment.number,
            epoch=1,
            tokens=[1, 2],
            last=True,
            digest=7,
            contract=contract_to_pb(Contract(seed=1, max_tokens=9, temperature=0.0)),
            plan=plan_to_pb(Plan(version=1, depth=4, width=2, nodes=6)),
        )
        await self.stream.receive(pb.DraftDown(snapshot=snapshot))

    async def lie(self) -> None:
        """A snapshot comes that has an id too many."""
        number = self.attachment.number
        snapshot = pb.Snapshot(attachment=number, epoch=1, tokens=[16], last=True)
        await self.stream.receive(pb.DraftDown(snapshot=snapshot))

    def _resync(self, attachment: Attachment) -> None:
        self.upstream.resubscribe(attachment, "drifted")

    def _refuse(self) -> None:
        self.refused += 1


@pytest_asyncio.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    rig = Rig(monkeypatch)
    await rig.open()
    yield rig
    await rig.close()


@pytest.mark.parametrize(("what", "why"), [(Rig.lie, "malformed: tokens: "), (Rig.drift, "malformed: drifted")])
async def test_a_session_that_fails_repeatedly_ends_with_the_reason(
    rig: Rig, what: Callable[[Rig], Awaitable[None]], why: str
) -> None:
    for number in range(1, MAX_RENEWALS + 1):
        assert rig.attachment.number == number
        await what(rig)
        assert rig.upstream.attachments
    await what(rig)
    assert not rig.upstream.attachments
    assert not rig.scheduler.members
    assert rig.upstream.refusals.attach_response(rig.attachment.key).refused.startswith(why)
    assert rig.sent == [*["subscribe"] * (MAX_RENEWALS + 1), "unsubscribe"]


async def test_an_occasional_renewal_ends_no_session(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "RENEWALS_S", -1.0)
    for _ in range(3 * MAX_RENEWALS):
        await rig.lie()
    assert rig.attachment.number == 3 * MAX_RENEWALS + 1
    assert rig.refused == 3 * MAX_RENEWALS
