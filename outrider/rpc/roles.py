"""Who may call what, by the role in the caller's certificate. Which drafter may see which session, tickets say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from outrider.errors import Forbidden
from outrider.rpc.status import translated
from outrider.rpc.tls import CLIENT, DRAFTER, ROUTER

CALLERS = {
    "/outrider.v1.Verifier/Decode": {ROUTER},
    "/outrider.v1.Verifier/Warm": {ROUTER},
    "/outrider.v1.Verifier/Watch": {ROUTER},
    "/outrider.v1.Verifier/Describe": {ROUTER, CLIENT},
    "/outrider.v1.TreeSink/Draft": {DRAFTER},
    "/outrider.v1.Drafter/Attach": {ROUTER},
    "/outrider.v1.Drafter/Detach": {ROUTER},
    "/outrider.v1.Drafter/Describe": {ROUTER, CLIENT},
}
OURS = "/outrider."  # of everything else, health and reflection, any certificate of the CA may ask

Handler = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Any]]


class ByRole(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs alone
    """Refuses a call unless its caller's certificate has a role that may make it; what is not in the table, always.

    For servers that demand certificates, and handlers that are coroutines.
    """

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The handler, behind a check."""
        handler, method = await continuation(details), details.method
        if handler is None or not method.startswith(OURS):
            return handler
        return _guarded(handler, method, CALLERS.get(method, set()))


def names(context: grpc.aio.ServicerContext[Any, Any]) -> set[str]:
    """The DNS names in the caller's certificate; none without one."""
    return {name.decode(errors="replace") for name in context.auth_context().get("peer_dns", ())}


def _guarded(handler: Any, method: str, callers: set[str]) -> Any:
    kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
    handle: Handler = getattr(handler, kind)

    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with translated(context):
            if not callers & names(context):
                allowed = " or ".join(sorted(callers)) or "nobody"
                raise Forbidden(
                    f"{method} is for {allowed}, and the caller's certificate is for another role; give it its own"
                )
        return await handle(request, context)

    wrap = getattr(grpc, f"{kind}_rpc_method_handler")
    return wrap(guarded, handler.request_deserializer, handler.response_serializer)


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"
