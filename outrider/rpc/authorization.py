"""Which role may call which method, by the role in the caller's certificate. Tickets decide which drafter may see which
session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from outrider.errors import Forbidden
from outrider.rpc.status import errors_as_status
from outrider.rpc.tls import CLIENT, DRAFTER, ROUTER

ALLOWED_ROLES = {
    "/outrider.v1.Verifier/Decode": {ROUTER},
    "/outrider.v1.Verifier/Warm": {ROUTER},
    "/outrider.v1.Verifier/Watch": {ROUTER},
    "/outrider.v1.Verifier/Describe": {ROUTER, CLIENT},
    "/outrider.v1.TreeSink/Draft": {DRAFTER},
    "/outrider.v1.Drafter/Attach": {ROUTER},
    "/outrider.v1.Drafter/Detach": {ROUTER},
    "/outrider.v1.Drafter/Describe": {ROUTER, CLIENT},
}
OUTRIDER_PREFIX = "/outrider."  # other methods (health, reflection) are open to any certificate of the CA

Handler = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Awaitable[Any]]


class ByRole(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in its stubs
    """Refuses a call unless its caller's certificate has a role that may call the method; methods missing in the table
    are always refused.

    For servers that require certificates, and handlers that are coroutines.
    """

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the handler, behind a check of the caller's role."""
        handler, method = await continuation(details), details.method
        if handler is None or not method.startswith(OUTRIDER_PREFIX):
            return handler
        return _guarded(handler, method, ALLOWED_ROLES.get(method, set()))


def certificate_names(context: grpc.aio.ServicerContext[Any, Any]) -> set[str]:
    """Return the DNS names in the caller's certificate; none without one."""
    return {name.decode(errors="replace") for name in context.auth_context().get("peer_dns", ())}


def _guarded(handler: Any, method: str, roles: set[str]) -> Any:
    kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
    handle: Handler = getattr(handler, kind)

    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with errors_as_status(context):
            if not roles & certificate_names(context):
                allowed = " or ".join(sorted(roles)) or "nobody"
                raise Forbidden(
                    f"{method} is for {allowed}, and the caller's certificate is for another role; give it its own"
                )
        return await handle(request, context)

    wrap = getattr(grpc, f"{kind}_rpc_method_handler")
    return wrap(guarded, handler.request_deserializer, handler.response_serializer)


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"
