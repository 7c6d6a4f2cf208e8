"""Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

from typing import Any

PATHS = ("/v1/messages",)  # paths whose errors have this shape begin so

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Return the JSON of an error; an empty `request_id` is none."""
    type_ = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": type_, "message": message}, "request_id": request_id or None}
