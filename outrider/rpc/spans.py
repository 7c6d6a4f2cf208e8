"""Spans of calls, on both sides: whoever was cancelled or out of time is told of as such."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import grpc.aio
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from outrider.errors import OutriderError
from outrider.rpc.status import code_of, from_rpc_error
from outrider.telemetry.tracing import TRACER, context_of, failed

_OVER_S = 0.05  # before its deadline, by our clock, gRPC may end a call
_FAULTS = {  # of a server; the others are its caller's
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}


class Served:
    """A call that we serve."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.answered = False  # the caller has all that there is: from here on it ends well, even if he hangs up


@asynccontextmanager
async def served(context: grpc.aio.ServicerContext[Any, Any], method: str) -> AsyncIterator[Served]:
    """Around a handler's body: the span of a call that we serve, below its caller's. `method`: "package.Service/Name".

    Source: OpenTelemetry's semantic conventions for gRPC; a server's CANCELLED is no error, and not OK.
    """
    parent = context_of(context.invocation_metadata())
    span = TRACER.start_span(method, parent, SpanKind.SERVER, _attributes(method))
    with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        call, code = Served(span), grpc.StatusCode.OK
        try:
            yield call
        except asyncio.CancelledError:
            if not call.answered:
                code = _code_of_end(context.time_remaining())
            raise
        except Exception as error:
            code = _code_of(error)
            raise
        finally:
            _ended(span, code, fault=code in _FAULTS)


@contextmanager
def calling(method: str) -> Iterator[Span]:
    """Around a call that we make, and all that is done with it: its span, current in the body."""
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
            _ended(span, code, fault=code is not grpc.StatusCode.OK)


def _attributes(method: str) -> dict[str, str]:
    return {"rpc.system.name": "grpc", "rpc.method": method}


def _code_of(error: Exception) -> grpc.StatusCode:
    """Of what a body has raised; what is no error of ours is a bug."""
    return code_of(error) if isinstance(error, OutriderError) else grpc.StatusCode.INTERNAL


def _code_of_end(left: float | None) -> grpc.StatusCode:
    """Why a call of ours was cancelled, which had so many seconds left."""
    return grpc.StatusCode.DEADLINE_EXCEEDED if left is not None and left <= _OVER_S else grpc.StatusCode.CANCELLED


def _ended(span: Span, code: grpc.StatusCode, *, fault: bool) -> None:
    if not span.is_recording():
        return
    span.set_attribute("rpc.response.status_code", code.name)
    if fault:
        failed(span, code.name)
    elif code is not grpc.StatusCode.OK:
        span.set_attribute("error.type", code.name)
