"""Logs: as text lines, or as JSON with the trace, the span and the session of each line."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

from opentelemetry import trace

LogFormat = Literal["text", "json"]

_SESSION: ContextVar[str] = ContextVar("session", default="")


@contextmanager
def session_context(session_id: str) -> Iterator[None]:
    """Attach a session id to all log lines of the body."""
    token = _SESSION.set(session_id)
    try:
        yield
    finally:
        _SESSION.reset(token)


def log_to_stderr(form: LogFormat) -> None:
    """Make all loggers write to stderr, from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Json() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class _Json(logging.Formatter):
    """Formats a line as JSON; the names are OpenTelemetry's."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, str] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "severity": record.levelname,
            "logger": record.name,
            "body": record.getMessage(),
        }
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line["trace_id"] = trace.format_trace_id(span.trace_id)
            line["span_id"] = trace.format_span_id(span.span_id)
        if session_id := _SESSION.get():
            line["session_id"] = session_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
