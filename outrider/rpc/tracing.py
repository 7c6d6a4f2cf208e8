"""Spans of calls, on both sides. A cancelled call and one past its deadline are marked as such."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

import grpc
import grpc.aio
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

from outrider.errors import OutriderError
from outrider.rpc.status import code_of, from_rpc_error
from outrider.telemetry.tracing import TRACER, extract_context, links_to, mark_failed

_DEADLINE_SLACK_S = 0.05  # gRPC may end a call this much before its deadline by our clock
_SERVER_FAULTS = {  # errors of the server; other codes are errors of its caller
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}


class CallContext(Protocol):
    """What a span takes from a call's context."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the caller's metadata."""

    def time_remaining(self) -> float | None:
        """Return the seconds to the call's deadline; None: it has none."""


class ServedCall:
    """A call that this process serves."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.completed = False  # the caller has everything: the call ends well now, even if the caller hangs up


@asynccontextmanager
async def server_span(context: CallContext, method: str, *, trusted: bool = True) -> AsyncIterator[ServedCall]:
    """Run a handler's body in the span of the call that it serves. `method`: "package.Service/Name".

    The span is below its caller's, who decides whether it is traced. A caller that is not `trusted` does not: the span
    begins another trace, and has a link to the caller's.

    Source: OpenTelemetry's semantic conventions for gRPC; a server's CANCELLED is neither an error nor OK. The option
    WithPublicEndpoint of OpenTelemetry for Go.
    """
    caller = extract_context(context.invocation_metadata())
    parent, links = (caller, None) if trusted else (Context(), links_to(caller))
    span = TRACER.start_span(method, parent, SpanKind.SERVER, _attributes(method), links)
    with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        call, code = ServedCall(span), grpc.StatusCode.OK
        try:
            yield call
        except asyncio.CancelledError:
            if not call.completed:
                code = _cancellation_code(context.time_remaining())
            raise
        except Exception as error:
            code = _code_of(error)
            raise
        finally:
            _finish_span(span, code, fault=code in _SERVER_FAULTS)


@contextmanager
def client_span(method: str) -> Iterator[Span]:
    """Run the body in the span of a call that this process makes, with all that is done with the call."""
    span = TRACER.start_span(method, None, SpanKind.CLIENT, _attributes(method))
    with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        code = grpc.StatusCode.OK
        try:
            yield span
        except (asyncio.CancelledError, GeneratorExit):
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.AioRpcError as error:
            code = code_of(from_rpc_error(error))
            raise
        except Exception as error:
            code = _code_of(error)
            raise
        finally:
            _finish_span(span, code, fault=code is not grpc.StatusCode.OK)


def _attributes(method: str) -> dict[str, str]:
    return {"rpc.system.name": "grpc", "rpc.method": method}


def _code_of(error: Exception) -> grpc.StatusCode:
    """Return the status of an exception of the body; any that is not an OutriderError is a bug."""
    return code_of(error) if isinstance(error, OutriderError) else grpc.StatusCode.INTERNAL


def _cancellation_code(left: float | None) -> grpc.StatusCode:
    """Return why a call to this process was cancelled, which had `left` seconds to its deadline."""
    return (
        grpc.StatusCode.DEADLINE_EXCEEDED
        if left is not None and left <= _DEADLINE_SLACK_S
        else grpc.StatusCode.CANCELLED
    )


def _finish_span(span: Span, code: grpc.StatusCode, *, fault: bool) -> None:
    if not span.is_recording():
        return
    span.set_attribute("rpc.response.status_code", code.name)
    if fault:
        mark_failed(span, code.name)
    elif code is not grpc.StatusCode.OK:
        span.set_attribute("error.type", code.name)
