"""Trace spans of one session's drafts: one while the session is attached, and below it one for each delta."""

from __future__ import annotations

import time
from dataclasses import replace

from opentelemetry.trace import Span

from outrider.core.tree.delta import Delta
from outrider.telemetry.tracing import Attributes, span_id_bytes, start_span, wall_ns


class TracedDrafts:
    """Makes the spans below the span of the Attach call."""

    def __init__(self, attach: Span, session_id: str, epoch: int, worker_id: str, tier: int) -> None:
        self._since = time.monotonic()  # when the present draft began
        about: Attributes = {
            "outrider.session.id": session_id,
            "outrider.epoch": epoch,
            "outrider.worker.id": worker_id,
            "outrider.tier": tier,
        }
        self._span = start_span("drafting", attach, self._since, about)

    def start_draft(self) -> None:
        """Start the time of the next draft: the upstream has sent something."""
        self._since = time.monotonic()

    def trace_delta(self, delta: Delta, *, exhausted: bool) -> Delta:
        """Make a delta's span, and return the delta with the span's id. A lower tier's delta has one already."""
        since, self._since = self._since, time.monotonic()
        if delta.span or not (delta.tokens or delta.rescored):
            return delta
        about = {
            "outrider.root_position": delta.root_position,
            "outrider.nodes.drafted": len(delta.tokens),
            "outrider.nodes.rescored": len(delta.rescored),
            "outrider.exhausted": exhausted,
        }
        span = start_span("draft", self._span, since, about)
        span.end(wall_ns(self._since))
        return replace(delta, span=span_id_bytes(span)) if delta.tokens else delta

    def end(self) -> None:
        """End the session's span."""
        self._span.end()
