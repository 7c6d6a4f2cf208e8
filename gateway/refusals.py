"""What went wrong, as OpenAI says it: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from typing import NamedTuple

from outrider.errors import (
    Busy,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    NotFound,
    OutriderError,
    Overloaded,
    Superseded,
    Unauthenticated,
    Unavailable,
)


class Refusal(NamedTuple):
    """An answer that is an error."""

    status: int
    body: dict[str, object]
    headers: dict[str, str]


class _Kind(NamedTuple):
    status: int
    type: str
    code: str | None = None


_KINDS: tuple[tuple[type[OutriderError], _Kind], ...] = (
    (InvalidRequest, _Kind(400, "invalid_request_error")),
    (Unauthenticated, _Kind(401, "invalid_request_error", "invalid_api_key")),
    (Forbidden, _Kind(403, "permission_error")),
    (NotFound, _Kind(404, "invalid_request_error", "model_not_found")),
    (Busy, _Kind(409, "conflict_error")),
    (Conflict, _Kind(409, "conflict_error")),
    (Superseded, _Kind(409, "conflict_error")),
    (Overloaded, _Kind(429, "rate_limit_error", "rate_limit_exceeded")),
    (Cancelled, _Kind(499, "server_error", "cancelled")),
    (Unavailable, _Kind(503, "server_error", "unavailable")),
    (DeadlineExceeded, _Kind(504, "server_error", "timeout")),
)
_BUG = _Kind(500, "server_error", "internal_error")


def refusal(error: OutriderError) -> Refusal:
    """How an error of the cluster is answered. A retry delay goes into the header that OpenAI's clients wait for."""
    kind = next((kind for family, kind in _KINDS if isinstance(error, family)), _BUG)
    param = error.field if isinstance(error, InvalidRequest) else None
    headers = {"retry-after": str(math.ceil(error.retry_after))} if isinstance(error, Overloaded) else {}
    return Refusal(kind.status, body(str(error), kind.type, param, kind.code), headers)


def body(message: str, type_: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """An error's JSON."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}
