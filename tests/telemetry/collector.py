"""A collector: receives traces and metrics by OTLP over gRPC, as any backend does, and keeps them."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass(frozen=True)
class Span:
    """One span, with what its process reports of itself."""

    name: str
    kind: str
    service: str
    instance: str
    trace: bytes
    identity: bytes
    parent: bytes
    began: int
    ended: int
    about: dict[str, Any]
    links: tuple[bytes, ...]
    events: tuple[str, ...]
    error: bool


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """What was received."""

    address: str = ""
    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # names, by service
    raw: list[bytes] = field(default_factory=list)  # all of it

    @property
    def environment(self) -> dict[str, str]:
        """Has a process send here, soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{self.address}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        }

    def of(self, trace: bytes) -> list[Span]:
        """The spans of one trace."""
        return [span for span in list(self.spans) if span.trace == trace]

    async def until(self, holds: Callable[[], bool], within_s: float = 20.0) -> None:
        """Waits until something holds of what was received."""
        give_up = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < give_up, (sorted({span.name for span in self.spans}), dict(self.metrics))
            await asyncio.sleep(0.05)

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.raw.append(request.SerializeToString())
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            self._spans(request)
            return trace_service_pb2.ExportTraceServiceResponse()
        for resource in request.resource_metrics:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_metrics:
                self.metrics[service] |= {metric.name for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def _spans(self, request: Any) -> None:
        for resource in request.resource_spans:
            who = _values(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Span(
                            name=span.name,
                            kind=KINDS.get(span.kind, "other"),
                            service=who["service.name"],
                            instance=who["service.instance.id"],
                            trace=span.trace_id,
                            identity=span.span_id,
                            parent=span.parent_span_id,
                            began=span.start_time_unix_nano,
                            ended=span.end_time_unix_nano,
                            about=_values(span.attributes),
                            links=tuple(link.span_id for link in span.links),
                            events=tuple(event.name for event in span.events),
                            error=span.status.code == 2,
                        )
                    )


def _values(attributes: Any) -> dict[str, Any]:
    def value(held: Any) -> Any:
        kind = held.WhichOneof("value")
        return [value(one) for one in held.array_value.values] if kind == "array_value" else getattr(held, kind)

    return {one.key: value(one.value) for one in attributes}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A collector that listens on this machine."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
