"""A span for each request of the API, below the caller's own, if its headers name one."""

from __future__ import annotations

from opentelemetry.trace import SpanKind
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.metrics import PATHS
from outrider.telemetry.tracing import TRACER, context_of, failed

API = "/v1/"
FAULT = 500  # statuses from here on are the server's own errors


class Traced:
    """An application whose requests are traced, from their arrival to the end of their answer, streams included.

    Source: OpenTelemetry's semantic conventions for HTTP servers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not path.startswith(API):
            await self._app(scope, receive, send)
            return
        route = path if path in PATHS else API
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        about = {"http.request.method": scope["method"], "http.route": route}
        with TRACER.start_as_current_span(
            f"{scope['method']} {route}", context_of(headers), SpanKind.SERVER, about, record_exception=False
        ) as span:

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= FAULT:
                        failed(span, str(message["status"]))
                await send(message)

            await self._app(scope, receive, noted)
