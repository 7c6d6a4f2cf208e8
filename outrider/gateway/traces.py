"""Traces of callers that are not trusted: a request begins a trace of its own, with a link to the caller's."""

from __future__ import annotations

from opentelemetry import trace
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.telemetry.tracing import extract_context, links_to

CONTEXT_HEADERS = (b"traceparent", b"tracestate", b"baggage")
_CALLER = "outrider.caller"  # key in a request's scope: links to the caller's span


class OwnTraces:
    """An application that does not see its callers' trace contexts, which FastAPI would make the parents of its spans.

    Its requests have a link to the caller's span, by `linked`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            headers = scope["headers"]
            caller = extract_context((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)
            own = [field for field in headers if field[0].lower() not in CONTEXT_HEADERS]
            scope = {**scope, "headers": own, _CALLER: links_to(caller)}
        await self._app(scope, receive, send)


def linked(app: ASGIApp) -> ASGIApp:
    """Return middleware that links the request's span to its caller's."""

    async def linking(scope: Scope, receive: Receive, send: Send) -> None:
        for link in scope.get(_CALLER, ()):
            trace.get_current_span().add_link(link.context)
        await app(scope, receive, send)

    return linking
