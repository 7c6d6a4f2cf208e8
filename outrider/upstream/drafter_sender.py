"""Sends the drafters of a session its snapshots, commits, plans, terms and credit, and this upstream's hints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from outrider.core.control.drafting_terms import RESTING_SCORE
from outrider.core.tree.delta import Hints
from outrider.upstream.upstream_session import Subscription, UpstreamSession
from outrider.wire import drafter as wire
from outrider.wire.drafter import SNAPSHOT_FEATURES, hints_to_pb, set_sent_terms, tokens_in_part
from outrider.wire.types import contract_to_pb, plan_to_pb


class DrafterSender:
    """Queues messages on the streams of the drafters that are subscribed to a session."""

    def pause(self, session: UpstreamSession) -> None:
        """Lets drafters rest until the next commit, if they have begun below the present root: their nodes would come
        too late. A drafter that still reads what it missed goes on.
        """
        root = session.tree.root.position
        for subscription in session.subscriptions.values():
            if subscription.begun == root != subscription.exhausted:
                self._send_commit(subscription, wire.Commit(position=len(session.tokens)), resting=True)

    def refresh(self, session: UpstreamSession) -> None:
        """Send a plan or credit that changed without a commit, also to drafters that rest."""
        for subscription in session.subscriptions.values():
            subscription.stream.hold(subscription.attachment, False)
            self._send_commit(subscription, wire.Commit(position=len(session.tokens)))

    def publish(self, session: UpstreamSession, position: int, tokens: Sequence[int]) -> None:
        """Send a session's drafters the committed tokens, from `position` on."""
        for subscription in session.subscriptions.values():
            subscription.stream.hold(subscription.attachment, session.terms.resting)
            if subscription.awaits_features:
                self.snapshot(subscription)
            else:
                self._send_commit(subscription, wire.Commit(position=position, tokens=tokens))

    def report_dropped(self, dropped: Mapping[Subscription, Sequence[int]]) -> None:
        """Report nodes that were dropped from the tree although the target may still choose them."""
        for subscription, ids in dropped.items():
            self._send_commit(subscription, wire.Commit(position=len(subscription.session.tokens), dropped=ids))

    def resend_snapshots(self, session: UpstreamSession) -> None:
        """Send a snapshot to all drafters of a session, whose tree was replaced."""
        for subscription in session.subscriptions.values():
            self.snapshot(subscription)

    def hint(self, session: UpstreamSession, hints: Hints) -> None:
        """Send a session's drafters the scores of this upstream's model."""
        for subscription in session.subscriptions.values():
            message = hints_to_pb(hints, attachment=subscription.attachment, epoch=session.epoch)
            session.wire_bytes += message.ByteSize()
            subscription.stream.hint(message)

    def _send_commit(self, subscription: Subscription, commit: wire.Commit, *, resting: bool = False) -> None:
        session = subscription.session
        if subscription.awaits_features:
            return  # its snapshot will include all of this
        if session.fused is not None and subscription.wants_features:
            before = commit.position - 1
            commit.features = session.fused.rows(before, before + len(commit.tokens))
        commit.attachment = subscription.attachment
        commit.epoch = session.epoch
        commit.digest = session.tree.digest
        terms = session.terms.sent
        subscription.rests = session.tree.root.position if terms.min_path_score == RESTING_SCORE else -1
        set_sent_terms(commit, terms._replace(min_path_score=RESTING_SCORE) if resting else terms)
        commit.credit = session.grant(subscription)
        if subscription.plan_version != session.terms.plan.version:
            commit.plan.CopyFrom(plan_to_pb(session.ceilings))
            subscription.plan_version = session.terms.plan.version
        session.wire_bytes += commit.ByteSize()
        if not subscription.stream.commit(commit):
            self.snapshot(subscription)

    def snapshot(self, subscription: Subscription) -> None:
        """Send the session's tokens and terms, once the features are known that the drafter wants."""
        session = subscription.session
        subscription.awaits_features = subscription.wants_features and not session.features_known
        if subscription.awaits_features:
            session.exhaust(subscription, session.tree.root.position)  # no step waits for nodes that it cannot draft
            return
        subscription.stream.snapshot(subscription.attachment, partial(snapshot_parts, subscription))


def snapshot_parts(subscription: Subscription) -> Iterator[wire.Snapshot]:
    """Yield a session's tokens committed by now, in parts, each made when it is sent, and the terms to draft under."""
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
            contract = replace(session.contract, logprobs=None, prompt_logprobs=None)  # drafters need none
            part.contract.CopyFrom(contract_to_pb(contract))
            part.plan.CopyFrom(plan_to_pb(session.ceilings))
            part.credit = session.grant(subscription)
            set_sent_terms(part, session.terms.sent)
            part.answer_position = session.answer_position
            part.unpadded_vocabulary = session.unpadded_vocabulary
            subscription.plan_version = session.terms.plan.version
        session.wire_bytes += part.ByteSize()
        yield part
