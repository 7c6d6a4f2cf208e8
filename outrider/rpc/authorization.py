"""Judges calls before their messages are read. Within a cluster the role in the caller's certificate decides which
methods it may call, and tickets decide which drafter may see which session; a router judges API keys."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio

from outrider.errors import Forbidden, InvalidRequest
from outrider.rpc.status import errors_as_status
from outrider.rpc.tls import CLIENT, DRAFTER, ROUTER, UPSTREAM

ALLOWED_ROLES = {
    "/outrider.v1.Verifier/Decode": {ROUTER},
    "/outrider.v1.Verifier/Warm": {ROUTER},
    "/outrider.v1.Verifier/ReadAdapter": {ROUTER},
    "/outrider.v1.Verifier/Watch": {ROUTER},
    "/outrider.v1.Verifier/Describe": {ROUTER, CLIENT},
    "/outrider.v1.TreeSink/Draft": {DRAFTER, ROUTER},  # a router relays those of drafters at its gate
    "/outrider.v1.Drafter/Attach": {ROUTER, UPSTREAM},
    "/outrider.v1.Drafter/Detach": {ROUTER, UPSTREAM},
    "/outrider.v1.Drafter/Describe": {ROUTER, CLIENT, UPSTREAM},
}
OUTRIDER_PREFIX = "/outrider."  # other methods are health and reflection
MESSAGE_S = 30.0  # time that the message of a call may take to arrive

Context = grpc.aio.ServicerContext[Any, Any]


class JudgedCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in its stubs
    """Judges each call before a message of it is read.

    grpc.aio reads and decodes the message of a call before it runs the handler, where the call has a single one. So the
    handlers that this interceptor returns take streams, of which they read the first message once `admitted` lets them.
    """

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the handler, behind the judgement."""
        handler = await continuation(details)
        return None if handler is None else self._judged(handler, details.method)

    def admitted(self, method: str, context: Context) -> AbstractAsyncContextManager[None]:
        """Return the context that a call runs in; entering it raises OutriderErrors for callers that may not call."""
        raise NotImplementedError

    async def read(self, method: str, context: Context) -> bytes:
        """Return the message of a call that has a single one. Raises InvalidRequest."""
        return await read_message(context, MESSAGE_S)

    def decode(self, method: str, decode: Callable[[bytes], Any], message: bytes) -> Any:
        """Return a message of a call that has many of them, decoded. Raises InvalidRequest."""
        return decode(message)

    def _judged(self, handler: Any, method: str) -> Any:
        kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        handle, decode = getattr(handler, kind), handler.request_deserializer
        run = partial(_written, handle) if inspect.isasyncgenfunction(handle) else handle

        async def judged(requests: AsyncIterator[Any], context: Context) -> Any:
            async with errors_as_status(context), self.admitted(method, context):
                if handler.request_streaming:
                    return await run(requests, context)
                return await run(decode(await self.read(method, context)), context)  # the handler may drop the message

        wrap = getattr(grpc, f"stream_{_arity(handler.response_streaming)}_rpc_method_handler")
        decoded = partial(self.decode, method, decode) if handler.request_streaming and decode is not None else None
        return wrap(judged, decoded, handler.response_serializer)


class JudgedByRole(JudgedCalls):
    """Refuses a call unless its caller's certificate has a role that may call the method; methods missing in the table
    are always refused. Health and reflection are open to any certificate of the CA.

    For servers that require certificates.
    """

    @asynccontextmanager
    async def admitted(self, method: str, context: Context) -> AsyncIterator[None]:
        """Raise Forbidden for a caller of another role."""
        roles = ALLOWED_ROLES.get(method, set())
        if method.startswith(OUTRIDER_PREFIX) and not roles & certificate_names(context):
            allowed = " or ".join(sorted(roles)) or "nobody"
            raise Forbidden(
                f"{method} is for {allowed}, and the caller's certificate is for another role; give it its own"
            )
        yield


def certificate_names(context: Context) -> set[str]:
    """Return the DNS names in the caller's certificate; none without one."""
    return {name.decode(errors="replace") for name in context.auth_context().get("peer_dns", ())}


async def read_message(context: Context, within_s: float) -> bytes:
    """Return the next message of a call whose handler decodes none. Raises InvalidRequest if it does not arrive."""
    try:
        async with asyncio.timeout(within_s):
            message = await context.read()
    except TimeoutError:
        raise InvalidRequest("message", f"did not arrive within {within_s:g} s") from None
    if not isinstance(message, bytes):  # the caller ended the call without one
        raise InvalidRequest("message", "is missing")
    return message


async def _written(handle: Callable[[Any, Context], AsyncGenerator[Any, None]], request: Any, context: Context) -> None:
    """Run a handler that is an asynchronous generator."""
    async for response in handle(request, context):
        await context.write(response)


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"
