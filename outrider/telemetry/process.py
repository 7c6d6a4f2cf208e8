"""Telemetry of a server process: sent to an OTLP collector if the environment names one, and read by Prometheus.

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
from importlib.metadata import PackageNotFoundError, version

from opentelemetry import metrics, trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from prometheus_client import CollectorRegistry

from outrider.telemetry.pages import Page, serving

SAMPLE_RATIO = 0.05  # share of requests that are traced by default
FLUSH_S = 2.0  # how long a collector may take to accept the rest when the process ends

log = logging.getLogger(__name__)

_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def _version() -> str:
    try:
        return version("outrider")
    except PackageNotFoundError:  # a checkout that is run without being installed
        return "unknown"


@contextmanager
def exporting_telemetry(
    role: str,
    instance: str,
    listen: str | None = None,
    pages: Mapping[str, Page] | None = None,
    registry: CollectorRegistry | None = None,
) -> Iterator[str]:
    """Export the process's telemetry while the body runs. `listen`: "host:port" for Prometheus' page, /metrics, and the
    further `pages`, by their paths; `registry`: of a page that the process serves elsewhere. Yield the bound address;
    empty without `listen`.

    What was recorded is sent before the end, as far as the collector accepts it. Raises ConfigError for an address that
    cannot be bound.
    """
    named = {
        "service.name": f"outrider-{role}",
        "service.version": _version(),
        "service.instance.id": instance,
    }
    resource = Resource.create({key: value for key, value in named.items() if key not in _environment_attributes()})
    collected = CollectorRegistry() if registry is None else registry
    with ExitStack() as stack:
        readers: list[MetricReader] = []
        shutdowns: list[Callable[[], None]] = []
        stack.callback(_shut_down, shutdowns)
        if _exports("TRACES"):
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            traces = TracerProvider(resource=resource, sampler=_sampler(), shutdown_on_exit=False)
            traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            trace.set_tracer_provider(traces)
            shutdowns.append(traces.shutdown)
        if _exports("METRICS"):
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

            readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
        if listen is not None or registry is not None:
            readers.append(PrometheusMetricReader(registry=collected))
        if readers:
            meters = MeterProvider(readers, resource, shutdown_on_exit=False)
            metrics.set_meter_provider(meters)
            shutdowns.append(meters.shutdown)
        address = "" if listen is None else stack.enter_context(serving(listen, collected, pages or {}))
        if address:
            log.info("%s: metrics at http://%s/metrics", role, address)
        yield address


def _shut_down(shutdowns: Sequence[Callable[[], None]]) -> None:
    """Send what is left. A collector that does not answer delays the end by at most FLUSH_S."""
    threads = [threading.Thread(target=shutdown, daemon=True) for shutdown in shutdowns]
    for thread in threads:
        thread.start()
    give_up = time.monotonic() + FLUSH_S
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))


def _exports(signal: str) -> bool:
    """Return whether the environment exports this signal by OTLP."""
    if os.environ.get(f"OTEL_{signal}_EXPORTER", "otlp") != "otlp":
        return False
    return any(os.environ.get(name) for name in (_ENDPOINT, f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"))


def _environment_attributes() -> set[str]:
    """Return the names of the resource attributes that the environment sets."""
    given = {entry.partition("=")[0].strip() for entry in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")}
    return given | ({"service.name"} if os.environ.get("OTEL_SERVICE_NAME") else set())


def _sampler() -> Sampler | None:
    """Return our sampler; None: the environment's."""
    return None if os.environ.get("OTEL_TRACES_SAMPLER") else ParentBased(TraceIdRatioBased(SAMPLE_RATIO))
