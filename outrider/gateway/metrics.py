"""The gateway's metrics. All unknown paths share one label, so that callers cannot create labels."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.telemetry.lag import loop_lag
from outrider.telemetry.metrics import histogram, register_metric

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
    "/v1/models",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/version",
    "/metrics",
    "/health",
)
GONE = "499"  # nginx's status for a client that disconnects before the answer


class GatewayMetrics:
    """The metrics of one gateway."""

    def __init__(self, certificate_expiry: Callable[[], float] = lambda: 0.0) -> None:
        """`certificate_expiry` returns the Unix time at which the certificate expires."""
        self.requests: Counter[tuple[str, ...]] = Counter()  # answered, by path and status
        self.running = 0
        self.lag = loop_lag()
        self._duration = histogram("outrider.gateway.duration")
        register_metric("outrider.gateway.requests", lambda: self.requests)
        register_metric("outrider.gateway.running", lambda: self.running)
        register_metric("outrider.certificate.expiry", certificate_expiry)

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

            self.running += 1
            try:
                await app(scope, receive, record_status)
            finally:
                self.running -= 1
                self.requests[path, status] += 1
                self._duration.record(time.monotonic() - began, {"path": path})

        return counting
