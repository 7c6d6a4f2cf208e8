"""Traces: one for each request, through every process that works for it.

The process that starts a request decides whether it is traced; the context travels as W3C's `traceparent` in the
metadata of each call. Sources: W3C Trace Context (2021); OpenTelemetry's semantic conventions for RPC and for
generative AI.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Metadata = tuple[tuple[str, str], ...]  # metadata of a gRPC call
Attributes = Mapping[str, str | bool | int | float | list[str]]

SPAN_BYTES = 8  # bytes of a span's id on the wire
TRACER = trace.get_tracer("outrider")

_W3C = TraceContextTextMapPropagator()
_EPOCH_NS = (
    time.time_ns() - time.monotonic_ns()
)  # spans are measured by the monotonic clock and exported by the wall clock


def wall_ns(monotonic_s: float) -> int:
    """Convert a time of `time.monotonic` to a span's timestamp."""
    return _EPOCH_NS + int(monotonic_s * 1e9)


def trace_metadata(span: Span | None = None) -> Metadata:
    """Return the metadata that carries `span`, or else the current one, to a callee; empty without a trace."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, None if span is None else trace.set_span_in_context(span))
    return tuple(carrier.items())


def extract_context(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """Return the caller's span from a call's metadata or headers; malformed entries are ignored."""
    return _W3C.extract({key.lower(): value for key, value in metadata or () if isinstance(value, str)}, Context())


def links_to(caller: Context) -> list[Link]:
    """Return a link to the caller's span; none if it has none."""
    context = trace.get_current_span(caller).get_span_context()
    return [Link(context)] if context.is_valid else []


def recording_span() -> Span | None:
    """Return the current span if this request is traced."""
    span = trace.get_current_span()
    return span if span.is_recording() else None


def mark_failed(span: Span, kind: str) -> None:
    """Mark a span as failed."""
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, kind))


def start_span(name: str, parent: Span, at: float, attributes: Attributes, drafts: Iterable[bytes] = ()) -> Span:
    """Start a span below `parent` at `at`, a time of `time.monotonic`; linked to spans of its trace by their ids."""
    context = parent.get_span_context()
    links = [Link(SpanContext(context.trace_id, int.from_bytes(span_id), True, TraceFlags(1))) for span_id in drafts]
    return TRACER.start_span(name, trace.set_span_in_context(parent), SpanKind.INTERNAL, attributes, links, wall_ns(at))


def span_id_bytes(span: Span) -> bytes:
    """Return a span's id as it is sent to other processes of its trace."""
    return span.get_span_context().span_id.to_bytes(SPAN_BYTES)
