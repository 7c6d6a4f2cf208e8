"""The gateway's metrics, for Prometheus. All unknown paths share one label, so that callers cannot create labels."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.telemetry.catalogue import BY_NAME
from outrider.telemetry.lag import loop_lag

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
GONE = "499"  # nginx's status for a client that disconnects before the answer


class GatewayMetrics:
    """The metrics of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "outrider_gateway_requests", "Requests answered.", ["path", "status"], registry=self._registry
        )
        self._running = Gauge("outrider_gateway_running", "Requests that run.", registry=self._registry)
        self._seconds = Histogram(
            "outrider_gateway_seconds",
            "From a request to its answer's end.",
            ["path"],
            buckets=SECONDS,
            registry=self._registry,
        )

        lag, stalls = BY_NAME["outrider.loop.lag"], BY_NAME["outrider.loop.stalls"]
        self.lag = loop_lag(
            Histogram(lag.exposed, lag.description, buckets=lag.buckets, registry=self._registry).observe,
            Counter(stalls.exposed, stalls.description, registry=self._registry).inc,
        )

    def shown(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def counted(self, app: ASGIApp) -> ASGIApp:
        """Return middleware that counts requests and measures their durations."""

        async def counting(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            path, status, began = scope["path"], GONE, time.monotonic()
            path = path if path in PATHS else "other"

            async def record_status(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = str(message["status"])
                await send(message)

            with self._running.track_inprogress():
                try:
                    await app(scope, receive, record_status)
                finally:
                    self._requests.labels(path, status).inc()
                    self._seconds.labels(path).observe(time.monotonic() - began)

        return counting
