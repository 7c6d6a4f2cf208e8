"""Whose decision it is that a call is traced."""

from __future__ import annotations

import secrets

import grpc.aio
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler

from outrider.rpc import tracing
from outrider.v1 import inference_pb2 as pb
from tests.router.rig import running_router

TRACE, CALLER = secrets.randbits(128), secrets.randbits(64)


async def exported(
    redis_url: str, patch: pytest.MonkeyPatch, root: Sampler, *, trusted: bool, sampled: bool
) -> list[ReadableSpan]:
    """The spans of a call with a trace context of its caller."""
    kept, provider = InMemorySpanExporter(), TracerProvider(sampler=ParentBased(root), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    patch.setattr(tracing, "TRACER", provider.get_tracer("test"))
    context = f"00-{TRACE:032x}-{CALLER:016x}-0{int(sampled)}"
    async with running_router(redis_url, trust_traces=trusted) as rig:
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.stub.Cancel(pb.CancelRequest(session_id="nobody"), metadata=(("traceparent", context),))
    provider.shutdown()
    return [span for span in kept.get_finished_spans() if span.name.endswith("/Cancel")]


async def test_a_caller_is_linked_but_no_parent_by_default(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await exported(redis_url, monkeypatch, ALWAYS_OFF, trusted=False, sampled=True) == []
    [span] = await exported(redis_url, monkeypatch, ALWAYS_ON, trusted=False, sampled=False)
    assert span.parent is None
    assert span.context.trace_id != TRACE
    assert [(link.context.trace_id, link.context.span_id) for link in span.links] == [(TRACE, CALLER)]


async def test_a_trusted_caller_decides_whether_its_request_is_traced(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await exported(redis_url, monkeypatch, ALWAYS_ON, trusted=True, sampled=False) == []
    [span] = await exported(redis_url, monkeypatch, ALWAYS_OFF, trusted=True, sampled=True)
    assert span.parent is not None
    assert (span.parent.span_id, span.context.trace_id, len(span.links)) == (CALLER, TRACE, 0)
