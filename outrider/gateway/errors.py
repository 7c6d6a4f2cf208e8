"""Errors in OpenAI's format: a status, and `{"error": {"message", "type", "param", "code"}}`.

Other APIs' responses have them in another shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.types import Scope

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
    TooLong,
    Unauthenticated,
    Unavailable,
)
from outrider.gateway import schema
from outrider.gateway.apis import anthropic_errors
from outrider.gateway.transport.request_ids import REQUEST_ID

ALTERNATIVE = re.compile(r"str|(list|function-|constrained-).*[\[\]].*")  # in a path: a type that was tried
NO_NAMES: Final[Mapping[str, str]] = {}


class Refusal(NamedTuple):
    """An error response."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


class _Kind(NamedTuple):
    status: int
    type: str
    code: str | None = None


_KINDS: tuple[tuple[type[OutriderError], _Kind], ...] = (
    (TooLong, _Kind(400, "invalid_request_error", "context_length_exceeded")),
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


def refusal(error: OutriderError, names: Mapping[str, str] = NO_NAMES) -> Refusal:
    """Return the response for an error of the cluster. A retry delay goes into the header that OpenAI's clients use.

    `names`: the caller's names of fields, by the cluster's.
    """
    kind = next((kind for family, kind in _KINDS if isinstance(error, family)), _BUG)
    if isinstance(error, InvalidRequest):
        field, problem = _own_name(error.field, names), str(error).removeprefix(f"{error.field}: ")
        return Refusal(kind.status, body(f"{field}: {problem}" if field else problem, kind.type, field, kind.code), {})
    headers = {"retry-after": str(math.ceil(error.retry_after))} if isinstance(error, Overloaded) else {}
    return Refusal(kind.status, body(str(error), kind.type, None, kind.code), headers)


def _own_name(field: str, names: Mapping[str, str]) -> str:
    """Return the caller's name of a field; of an entry of a list that the caller has as another one, the list's."""
    return names.get(field, names.get(field.partition("[")[0], field))


def response(error: OutriderError, scope: Scope, names: Mapping[str, str] = NO_NAMES) -> JSONResponse:
    """Return `refusal` as a response to the request of a scope."""
    return in_shape(refusal(error, names), scope)


def in_shape(refused: Refusal, scope: Scope) -> JSONResponse:
    """Return an error response in the shape of the API that the request of a scope is for."""
    content = refused.body
    if scope["path"].startswith(anthropic_errors.PATHS):
        content = anthropic_errors.body(refused.status, content["error"]["message"], scope.get(REQUEST_ID, ""))
    return JSONResponse(content, refused.status, headers=refused.headers)


def body(message: str, type_: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the JSON of an error."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def _likeliest(errors: Sequence[Any]) -> Any:
    """Return the first field's first error that is not about the value's type; if there is none, the first error."""
    of_field = [it for it in errors if it["loc"][:1] == errors[0]["loc"][:1]]
    return next((it for it in of_field if not it["type"].endswith("_type")), errors[0])


def invalid(error: RequestValidationError) -> dict[str, Any]:
    """Return the JSON for a malformed request body: its first error, in OpenAI's words."""
    errors = error.errors()
    entry = next((it for it in errors if it["type"] == schema.UNSUPPORTED), _likeliest(errors))
    path = [str(part) for part in entry["loc"] if not ALTERNATIVE.fullmatch(str(part))]
    match entry["type"]:
        case "extra_forbidden":
            message = f"Unrecognized request argument supplied: {'.'.join(path)}"
            return body(message, "invalid_request_error", ".".join(path))
        case "missing":
            return body(f"you must provide a {'.'.join(path)} parameter", "invalid_request_error", ".".join(path))
        case "json_invalid":
            return body("We could not parse the JSON body of your request.", "invalid_request_error")
        case schema.UNSUPPORTED:
            message = f"Unsupported parameter: '{'.'.join(path)}' {entry['msg']}"
            return body(message, "invalid_request_error", ".".join(path), "unsupported_parameter")
    text = str(entry["msg"]).removeprefix("Value error, ")
    if path:  # later parts of the path only name the alternative that pydantic tried
        code = "unsupported_value" if entry["type"] == "literal_error" else None
        return body(f"{path[0]}: {text}", "invalid_request_error", path[0], code)
    named = text.partition(":")[0]
    return body(text, "invalid_request_error", named if named.isidentifier() else None)
