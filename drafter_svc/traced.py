"""What a trace tells of one session's drafts: a span while it is drafted for, and below it one for each delta."""

from __future__ import annotations

import time
from dataclasses import replace

from opentelemetry.trace import Span

from drafter_svc.upstream import Attachment
from outrider.core.tree import Delta
from outrider.telemetry.tracing import Attributes, began, identity, wall_ns


class TracedDrafts:
    """Tells of drafts below the span of the Attach call."""

    def __init__(self, attach: Span, attachment: Attachment, worker_id: str, tier: int) -> None:
        self._since = time.monotonic()  # when what is drafted now was begun
        about: Attributes = {
            "outrider.session.id": attachment.session_id,
            "outrider.epoch": attachment.epoch,
            "outrider.worker.id": worker_id,
            "outrider.tier": tier,
        }
        self._span = began("drafting", attach, self._since, about)

    def heard(self) -> None:
        """The upstream has said something: from here on is drafted for that."""
        self._since = time.monotonic()

    def drafted(self, delta: Delta, *, exhausted: bool) -> Delta:
        """What is sent, under the span that tells of it. What a lower tier has drafted has one already."""
        since, self._since = self._since, time.monotonic()
        if delta.span or not (delta.tokens or delta.rescored):
            return delta
        about = {
            "outrider.root_position": delta.root_position,
            "outrider.nodes.drafted": len(delta.tokens),
            "outrider.nodes.rescored": len(delta.rescored),
            "outrider.exhausted": exhausted,
        }
        span = began("draft", self._span, since, about)
        span.end(wall_ns(self._since))
        return replace(delta, span=identity(span)) if delta.tokens else delta

    def ended(self) -> None:
        """Nothing more is drafted for it."""
        self._span.end()
