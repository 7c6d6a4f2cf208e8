"""A session whose frames are of no use is asked for anew, but not without end: then its router gets the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from drafter_svc.ngram_drafter import NgramScheduler
from drafter_svc.upstreams import upstream as upstreams
from drafter_svc.upstreams.upstream import MAX_RENEWALS, Attachment, Upstream
from outrider.core.proposers.lookup import Lookups
from outrider.core.session.contract import Contract, Plan
from outrider.v1 import drafter_pb2 as pb
from outrider.wire.codec import contract_to_pb, plan_to_pb


class Rig:
    """A drafter's stream that is open, with one session; its frames are put in here. It must not get to its event
    loop, where it would connect."""

    def __init__(self) -> None:
        self.refused = 0
        self.attachment = Attachment("s", "", 1, b"")
        self.scheduler = NgramScheduler(Lookups("suffix", None), slots=1, send=lambda *_: None, resync=self._resync)
        self.upstream = Upstream("127.0.0.1:1", pb.Hello(vocabulary=16), self.scheduler, self._refuse)
        self.upstream._open = True
        self.upstream.attach(self.attachment)

    def drift(self) -> None:
        """A snapshot comes that is well formed, and whose digest is another text's."""
        self.upstream._receive(
            pb.DraftDown(
                snapshot=pb.Snapshot(
                    attachment=self.attachment.number,
                    epoch=1,
                    tokens=[1, 2],
                    last=True,
                    digest=7,
                    contract=contract_to_pb(Contract(seed=1, max_tokens=9, temperature=0.0)),
                    plan=plan_to_pb(Plan(version=1, depth=4, width=2, nodes=6)),
                )
            )
        )
        self.scheduler._serve(self.attachment, self.scheduler.members[self.attachment])

    def lie(self) -> None:
        """A snapshot comes that has an id too many."""
        number = self.attachment.number
        self.upstream._receive(pb.DraftDown(snapshot=pb.Snapshot(attachment=number, epoch=1, tokens=[16], last=True)))

    def _resync(self, attachment: Attachment) -> None:
        self.upstream.resubscribe(attachment, "drifted")

    def _refuse(self) -> None:
        self.refused += 1


@pytest.mark.parametrize(("what", "why"), [(Rig.lie, "malformed: tokens: "), (Rig.drift, "malformed: drifted")])
async def test_a_session_that_is_no_use_again_and_again_ends_with_the_reason(
    what: Callable[[Rig], None], why: str
) -> None:
    rig = Rig()
    for number in range(1, MAX_RENEWALS + 1):
        assert rig.attachment.number == number
        what(rig)
        assert rig.upstream.attachments
    what(rig)
    assert not rig.upstream.attachments
    assert not rig.scheduler.members
    assert rig.upstream.refusals.attach_response(rig.attachment.key).refused.startswith(why)
    frames = rig.upstream._outgoing
    assert [isinstance(frame, pb.DraftUp) and frame.WhichOneof("frame") for frame in frames] == ["subscribe"] * (
        MAX_RENEWALS + 1
    ) + ["unsubscribe"]
    await rig.upstream.close()


async def test_what_goes_wrong_now_and_then_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(upstreams, "RENEWALS_S", -1.0)
    for _ in range(3 * MAX_RENEWALS):
        rig.lie()
    assert rig.attachment.number == 3 * MAX_RENEWALS + 1
    assert rig.refused == 3 * MAX_RENEWALS
    await rig.upstream.close()
