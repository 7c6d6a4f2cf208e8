"""Traces: one for each request, through every process that works for it.

Whoever starts a request decides whether it is traced; the context travels as W3C's `traceparent` in the metadata of
each call. Sources: W3C Trace Context (2021); OpenTelemetry's semantic conventions for RPC and for generative AI.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Metadata = tuple[tuple[str, str], ...]  # of a gRPC call
Attributes = Mapping[str, str | bool | int | float | list[str]]

SPAN_BYTES = 8  # of a span's id on the wire
TRACER = trace.get_tracer("outrider")

_W3C = TraceContextTextMapPropagator()
_EPOCH_NS = time.time_ns() - time.monotonic_ns()  # spans are timed by the monotonic clock, and told by the wall's


def wall_ns(monotonic_s: float) -> int:
    """A moment of `time.monotonic` as spans take it."""
    return _EPOCH_NS + int(monotonic_s * 1e9)


def carried(span: Span | None = None) -> Metadata:
    """A span, or else the current one, for a call's metadata; nothing where there is no trace."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, None if span is None else trace.set_span_in_context(span))
    return tuple(carrier.items())


def context_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The span that a call was made in, as its metadata or its headers say; what is malformed is none."""
    return _W3C.extract({key.lower(): value for key, value in metadata or () if isinstance(value, str)})


def recording() -> Span | None:
    """The current span, if this request is traced."""
    span = trace.get_current_span()
    return span if span.is_recording() else None


def failed(span: Span, kind: str) -> None:
    """Marks a span as one that ended by an error."""
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, kind))


def began(name: str, parent: Span, at: float, attributes: Attributes, drafts: Iterable[bytes] = ()) -> Span:
    """A span below `parent` that began at a moment of `time.monotonic`; linked to spans of its trace, by their ids."""
    above = parent.get_span_context()
    links = [Link(SpanContext(above.trace_id, int.from_bytes(own), True, TraceFlags(1))) for own in drafts]
    return TRACER.start_span(name, trace.set_span_in_context(parent), SpanKind.INTERNAL, attributes, links, wall_ns(at))


def identity(span: Span) -> bytes:
    """A span's id as it goes over the wire to others of its trace."""
    return span.get_span_context().span_id.to_bytes(SPAN_BYTES)
