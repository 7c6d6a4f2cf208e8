"""The mapping between errors and gRPC status codes, in both directions.

The class of an error travels in trailing metadata, so that a caller raises what the server raised. The status code
decides only if a server or a proxy of another program answered.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from outrider import errors
from outrider.errors import InvalidRequest, OutriderError, Overloaded
from outrider.rpc.tls import connection_advice
from outrider.wire import verifier as wire

CLASS_KEY = "outrider-error"
FIELD_KEY = "outrider-field"
RETRY_KEY = "retry-after-ms"

_ABORT_S = 0.3  # how long the write of a status may take
_MAX_DETAILS = 1024  # characters; a longer text does not fit into HTTP/2 trailers

CODES: dict[type[OutriderError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.TooLong: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.TokenizerMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.Superseded: grpc.StatusCode.ABORTED,
    errors.Busy: grpc.StatusCode.ALREADY_EXISTS,
    errors.Conflict: grpc.StatusCode.OUT_OF_RANGE,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Moved: grpc.StatusCode.UNAVAILABLE,  # right also for clients that do not know the class
    errors.Stalled: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.CheckpointError: grpc.StatusCode.DATA_LOSS,
    errors.ConfigError: grpc.StatusCode.UNIMPLEMENTED,  # another program answers at a configured address
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
_BY_NAME = {kind.__name__: kind for kind in CODES}
BY_CODE = {code: kind for kind, code in CODES.items() if kind.__base__ is OutriderError}

log = logging.getLogger(__name__)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> NoReturn:
    """End the call with the error's status, without waiting for a peer that does not read. Never returns.

    grpc.aio keeps the exception that its own `abort` raises, in the call. That exception must not refer to the frames
    of the handler: they refer to the call, and all that they hold, a request of megabytes too, would stay until the
    garbage collector finds the cycle.
    """
    metadata = [(CLASS_KEY, type(error).__name__)]
    if isinstance(error, InvalidRequest):
        metadata.append((FIELD_KEY, error.field))
    if isinstance(error, Overloaded):
        metadata.append((RETRY_KEY, str(round(error.retry_after * 1000))))
    try:
        async with asyncio.timeout(_ABORT_S):
            await context.abort(code_of(error), str(error)[:_MAX_DETAILS], tuple(metadata))
    except grpc.aio.AbortError as aborted:
        aborted.__traceback__ = aborted.__context__ = None
    except (TimeoutError, grpc.aio.InternalError):
        pass
    raise asyncio.CancelledError


def code_of(error: OutriderError) -> grpc.StatusCode:
    """Return the status code for an error."""
    return CODES.get(type(error), grpc.StatusCode.INTERNAL)


def from_rpc_error(error: grpc.aio.AioRpcError) -> OutriderError:
    """Return the error that the server raised, or one by the status code if the server is of another program."""
    metadata = _texts(error.trailing_metadata())
    kind = _BY_NAME.get(metadata.get(CLASS_KEY, ""))
    details = error.details() or error.code().name
    if kind is None:
        return _from_code(error.code(), details)
    return _error(kind, details, metadata.get(FIELD_KEY, "request"), _milliseconds(metadata.get(RETRY_KEY, "")))


def error_to_pb(error: OutriderError) -> wire.Error:
    """Return the error's message, for one of the many generations of a stream."""
    message = wire.Error(kind=type(error).__name__, details=str(error)[:_MAX_DETAILS])
    if isinstance(error, InvalidRequest):
        message.field = error.field
    if isinstance(error, Overloaded):
        message.retry_after_ms = round(error.retry_after * 1000)
    return message


def error_from_pb(message: wire.Error) -> OutriderError:
    """Return the error that the server raised; an InternalError for a kind that is not known here."""
    kind = _BY_NAME.get(message.kind, errors.InternalError)
    return _error(kind, message.details, message.field or "request", message.retry_after_ms / 1000)


def _error(kind: type[OutriderError], details: str, field: str, retry_s: float) -> OutriderError:
    if issubclass(kind, InvalidRequest):
        return kind(field, details.removeprefix(f"{field}: "))
    if issubclass(kind, Overloaded):
        return kind(details, retry_after=retry_s)
    return kind(details)


def is_from_outrider(error: grpc.aio.AioRpcError) -> bool:
    """Return whether an Outrider server sent the error, and not gRPC."""
    return CLASS_KEY in _texts(error.trailing_metadata())


def _from_code(code: grpc.StatusCode, details: str) -> OutriderError:
    kind = BY_CODE.get(code, errors.InternalError)
    if kind is errors.Overloaded and "larger than max" in details:  # gRPC's code for an oversized message
        return InvalidRequest("request", details)
    if kind is InvalidRequest:
        return InvalidRequest("request", details)
    if kind is errors.ConfigError:
        return errors.ConfigError(f"the server at this address is of another kind or version: {details}")
    if kind is errors.Unavailable:
        return errors.Unavailable(connection_advice(details) or details)
    if kind is errors.DeadlineExceeded:
        return errors.DeadlineExceeded("the call did not end within its timeout")
    return kind(details)


def _texts(metadata: Any) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _milliseconds(text: str) -> float:
    """Convert a header from milliseconds to seconds; 1 second if it is malformed."""
    return int(text) / 1000 if text.isascii() and text.isdigit() and len(text) < 10 else 1.0


@asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turn OutriderErrors of a handler's body into statuses; log any other error once, as a bug.

    Cancellation passes untouched: grpc.aio leaks when a handler swallows it.
    """
    try:
        yield
    except OutriderError as error:
        traceback.clear_frames(error.__traceback__)  # they hold the message; see `abort`
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except DecodeError as error:
        traceback.clear_frames(error.__traceback__)
        await abort(context, InvalidRequest("message", "is not one of this protocol: its bytes do not parse"))
    except (grpc.aio.InternalError, grpc.aio.UsageError):  # a write after the end of the call: the peer is gone
        raise asyncio.CancelledError from None
    except Exception:
        log.exception("a handler failed")
        await abort(context, errors.InternalError("an internal error; the server's log has the details"))
