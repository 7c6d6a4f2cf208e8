"""A session's snapshot as it is sent to a drafter: in parts, each made when it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from outrider.upstream_server.upstream_session import Subscription
from outrider.wire import drafter as wire
from outrider.wire.drafter import SNAPSHOT_FEATURES, set_sent_terms, tokens_in_part
from outrider.wire.types import contract_to_pb, plan_to_pb


def snapshot_parts(subscription: Subscription) -> Iterator[wire.Snapshot]:
    """Yield a session's tokens committed by now, in parts, and the terms to draft under."""
    session = subscription.session
    tokens, digest = tuple(session.tokens), session.tree.digest
    fused = session.fused if subscription.wants_features else None
    size = tokens_in_part(fused.width if fused is not None else 0)
    first = max(1, len(tokens) - SNAPSHOT_FEATURES)  # first token that features come with
    for start in range(0, len(tokens), size):
        end = min(start + size, len(tokens))
        part = wire.Snapshot(
            attachment=subscription.attachment,
            epoch=session.epoch,
            position=start,
            tokens=tokens[start:end],
            vocabulary=session.vocabulary,
        )
        if fused is not None and first < end:
            part.features = fused.rows(max(start, first) - 1, end - 1)
        if end == len(tokens):
            part.last = True
            part.digest = digest
            part.contract.CopyFrom(contract_to_pb(replace(session.contract, logprobs=None)))  # drafters need none
            part.plan.CopyFrom(plan_to_pb(session.ceilings))
            part.credit = session.grant(subscription)
            set_sent_terms(part, session.terms.sent)
            part.answer_position = session.answer_position
            part.unpadded_vocabulary = session.unpadded_vocabulary
            subscription.plan_version = session.terms.plan.version
        session.wire_bytes += part.ByteSize()
        yield part
