"""What a server process tells, and to whom: an OTLP collector, as the environment says, and Prometheus, which asks.

The environment is OpenTelemetry's own: OTEL_EXPORTER_OTLP_ENDPOINT switches both traces and metrics on,
OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG choose what is traced, OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
name the process, OTEL_SDK_DISABLED switches all of it off.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from prometheus_client import CollectorRegistry

from outrider.telemetry.pages import Page, serving

SAMPLED = 0.05  # share of requests that are traced, where nobody says otherwise
LAST_S = 2.0  # that a collector gets to take what is left when the process ends

log = logging.getLogger(__name__)

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@contextmanager
def telling(
    role: str, instance: str, listen: str | None = None, pages: Mapping[str, Page] | None = None
) -> Iterator[str]:
    """While the body runs, the process tells of itself. `listen`: "host:port" of a page for Prometheus, /metrics, and
    of these further `pages`, by their paths. Yields its address, with the port that it took; empty: there is none.

    What was recorded is sent before it ends, in so far as the collector takes it. Raises ConfigError for an address
    that cannot be had.
    """
    named = {
        "service.name": f"outrider-{role}",
        "service.version": version("outrider"),
        "service.instance.id": instance,
    }
    resource = Resource.create({key: value for key, value in named.items() if key not in _own_attributes()})
    registry = CollectorRegistry()
    with ExitStack() as stack:
        readers: list[MetricReader] = []
        ends: list[Callable[[], None]] = []
        stack.callback(_end, ends)
        if _exports("TRACES"):
            traces = TracerProvider(resource=resource, sampler=_sampler(), shutdown_on_exit=False)
            traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            trace.set_tracer_provider(traces)
            ends.append(traces.shutdown)
        if _exports("METRICS"):
            readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
        if listen is not None:
            readers.append(PrometheusMetricReader(registry=registry))
        if readers:
            meters = MeterProvider(readers, resource, shutdown_on_exit=False)
            metrics.set_meter_provider(meters)
            ends.append(meters.shutdown)
        address = "" if listen is None else stack.enter_context(serving(listen, registry, pages or {}))
        if address:
            log.info("%s: metrics at http://%s/metrics", role, address)
        yield address


def _end(ends: Sequence[Callable[[], None]]) -> None:
    """Sends what is left. A collector that does not answer holds nobody up for long."""
    threads = [threading.Thread(target=end, daemon=True) for end in ends]
    for thread in threads:
        thread.start()
    give_up = time.monotonic() + LAST_S
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))


def _exports(signal: str) -> bool:
    """Whether somebody wants this signal by OTLP."""
    if os.environ.get(f"OTEL_{signal}_EXPORTER", "otlp") != "otlp":
        return False
    return any(os.environ.get(name) for name in (_ENDPOINT, f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"))


def _own_attributes() -> set[str]:
    """What the environment says about the process."""
    given = {entry.partition("=")[0].strip() for entry in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")}
    return given | ({"service.name"} if os.environ.get("OTEL_SERVICE_NAME") else set())


def _sampler() -> Sampler | None:
    """Ours; None: the environment's."""
    return None if os.environ.get("OTEL_TRACES_SAMPLER") else ParentBased(TraceIdRatioBased(SAMPLED))
