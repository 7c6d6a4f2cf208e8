"""The one place where errors map to gRPC status codes, both ways.

The class travels in trailing metadata, so that a caller gets back what the server raised. The status code
alone decides when a server or a proxy that is not ours answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from outrider import errors
from outrider.errors import InvalidRequest, OutriderError, Overloaded
from outrider.rpc.tls import explained

CLASS_KEY = "outrider-error"
FIELD_KEY = "outrider-field"
RETRY_KEY = "retry-after-ms"

_LAST_WORD_S = 0.3  # for a status to be written
_DETAILS = 1024  # characters; a longer text would not fit into HTTP/2 trailers

_CODES: dict[type[OutriderError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.TokenizerMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.Superseded: grpc.StatusCode.ABORTED,
    errors.Busy: grpc.StatusCode.ALREADY_EXISTS,
    errors.Conflict: grpc.StatusCode.OUT_OF_RANGE,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.Moved: grpc.StatusCode.UNAVAILABLE,  # what a client that does not know the class does is right as well
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.CheckpointError: grpc.StatusCode.DATA_LOSS,
    errors.ConfigError: grpc.StatusCode.UNIMPLEMENTED,  # something else answers at a configured address
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
_BY_NAME = {kind.__name__: kind for kind in _CODES}
_BY_CODE = {code: kind for kind, code in _CODES.items() if kind.__base__ is OutriderError}

log = logging.getLogger(__name__)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> NoReturn:
    """Ends the call with the error's status, and does not wait for a peer that does not read.

    Never returns: the raised exception is gRPC's own way out.
    """
    metadata = [(CLASS_KEY, type(error).__name__)]
    if isinstance(error, InvalidRequest):
        metadata.append((FIELD_KEY, error.field))
    if isinstance(error, Overloaded):
        metadata.append((RETRY_KEY, str(round(error.retry_after * 1000))))
    with suppress(TimeoutError, grpc.aio.InternalError):  # the peer does not read, or is gone
        async with asyncio.timeout(_LAST_WORD_S):
            await context.abort(code_of(error), str(error)[:_DETAILS], tuple(metadata))
    raise asyncio.CancelledError


def code_of(error: OutriderError) -> grpc.StatusCode:
    """The status that it becomes."""
    return _CODES.get(type(error), grpc.StatusCode.INTERNAL)


def from_rpc_error(error: grpc.aio.AioRpcError) -> OutriderError:
    """The error that the server raised; judged by its status code where the server is not ours."""
    metadata = _texts(error.trailing_metadata())
    kind = _BY_NAME.get(metadata.get(CLASS_KEY, ""))
    details = error.details() or error.code().name
    if kind is None:
        return _from_code(error.code(), details)
    if issubclass(kind, InvalidRequest):
        field = metadata.get(FIELD_KEY, "request")
        return kind(field, details.removeprefix(f"{field}: "))
    if issubclass(kind, Overloaded):
        return kind(details, retry_after=_milliseconds(metadata.get(RETRY_KEY, "")))
    return kind(details)


def is_from_outrider(error: grpc.aio.AioRpcError) -> bool:
    """Whether a server of ours said it, and not gRPC."""
    return CLASS_KEY in _texts(error.trailing_metadata())


def _from_code(code: grpc.StatusCode, details: str) -> OutriderError:
    kind = _BY_CODE.get(code, errors.InternalError)
    if kind is errors.Overloaded and "larger than max" in details:  # gRPC's own code for an oversized message
        return InvalidRequest("request", details)
    if kind is InvalidRequest:
        return InvalidRequest("request", details)
    if kind is errors.ConfigError:
        return errors.ConfigError(f"the server at this address is of another kind or version: {details}")
    if kind is errors.Unavailable:
        return errors.Unavailable(explained(details) or details)
    if kind is errors.DeadlineExceeded:
        return errors.DeadlineExceeded("the call did not end within its timeout")
    return kind(details)


def _texts(metadata: Any) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _milliseconds(text: str) -> float:
    """Of a header, in seconds; what nobody can mean is a second."""
    return int(text) / 1000 if text.isascii() and text.isdigit() and len(text) < 10 else 1.0


@asynccontextmanager
async def translated(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Around a handler's body: its OutriderErrors become statuses; anything else is logged once, as a bug.

    Cancellation passes untouched: grpc.aio leaks when a handler swallows it.
    """
    try:
        yield
    except OutriderError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except DecodeError:
        await abort(context, InvalidRequest("message", "is not one of this protocol: its bytes do not parse"))
    except (grpc.aio.InternalError, grpc.aio.UsageError):  # a write that met the end of the call: the peer is gone
        raise asyncio.CancelledError from None
    except Exception:
        log.exception("a handler failed")
        await abort(context, errors.InternalError("an internal error; the server's log has the details"))
