"""What a session grants and sends to its drafters, and holds them to."""

from __future__ import annotations

import pytest

from outrider.core.control.cost.calibration import Calibration
from outrider.core.control.holds.arrival_model import ArrivalPatterns
from outrider.core.session.contract import Contract, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.core.tree.delta import Delta
from outrider.engine.kv.kv_slots import AcquiredSlot
from outrider.errors import InvalidRequest
from outrider.upstream.drafter_sender import snapshot_parts
from outrider.upstream.upstream_session import Subscription, UpstreamStream
from outrider.v1 import types_pb2
from verifier_svc.session import TREE_CAPACITY, SessionStart, VerifierSession

TOKENS = (1, 2, 3)
VOCABULARY, UNPADDED = 64, 60


def subscribed(**terms: int) -> Subscription:
    """A drafter of a session."""
    start = SessionStart("s", "", 1, TOKENS, 3, Contract(seed=1, max_tokens=100, **terms), Plan(version=1, depth=8), 64)
    session = VerifierSession(
        start,
        AcquiredSlot(0, len(TOKENS) - 1, None),
        VOCABULARY,
        ArrivalPatterns(),
        unpadded_vocabulary=UNPADDED,
    )
    return session.subscribe(UpstreamStream("d", types_pb2.Heartbeat), 1, Calibration())


def chains(first_id: int, count: int, token: int = 0) -> Delta:
    """Nodes in chains of fifty, each of which begins with another token."""
    parents = tuple(identity - 1 if (identity - first_id) % 50 else 0 for identity in range(first_id, first_id + count))
    tokens = tuple(token + place // 50 for place in range(count))
    return Delta(len(TOKENS) - 1, extend(EMPTY, TOKENS), first_id, parents, tokens, (-0.5,) * count)


def test_a_credit_that_was_given_holds_though_a_later_one_is_smaller() -> None:
    """The drafter may have sent its nodes before it received the smaller credit."""
    subscription = subscribed()
    session: VerifierSession = subscription.session  # type: ignore[assignment]
    given = session.grant(subscription)
    assert given == TREE_CAPACITY
    session.tree.graft(9, chains(1, 300))
    assert session.grant(subscription) == TREE_CAPACITY - 300
    session.graft(subscription, chains(1, given, token=20), 0.0, passing=False)
    with pytest.raises(InvalidRequest, match="beyond the credit"):
        session.graft(subscription, chains(given + 1, 1, token=50), 0.0, passing=False)


def test_a_snapshot_has_exactly_the_fields_that_drafting_needs() -> None:
    (part,) = snapshot_parts(subscribed(logprobs=3))
    assert (part.last, part.position, tuple(part.tokens)) == (True, 0, TOKENS)
    assert part.digest == extend(EMPTY, TOKENS)
    assert (part.vocabulary, part.unpadded_vocabulary) == (VOCABULARY, UNPADDED)
    assert not part.contract.HasField("logprobs")
    assert part.credit == TREE_CAPACITY
    assert part.answer_position == len(TOKENS)
