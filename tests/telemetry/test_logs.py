"""A line of the log names what it is about."""

from __future__ import annotations

import io
import json
import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider

from outrider.telemetry import logs


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream, root = io.StringIO(), logging.getLogger()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    logs.log_to_stderr("json")
    return stream


def test_a_log_line_has_its_trace_span_and_session(logged: io.StringIO) -> None:
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("request") as span, logs.session_context("session-7"):
        logging.getLogger("router").warning("moves: %d\nlines", 3)
    logging.getLogger("router").info("on its own")
    first, second = map(json.loads, logged.getvalue().splitlines())
    assert first["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert first["span_id"] == f"{span.get_span_context().span_id:016x}"
    assert (first["session_id"], first["body"], first["severity"]) == ("session-7", "moves: 3\nlines", "WARNING")
    assert second.keys() == {"timestamp", "severity", "logger", "body"}


def test_an_exception_stays_on_its_line(logged: io.StringIO) -> None:
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("router").exception("a handler failed")
    (line,) = logged.getvalue().splitlines()
    assert "ValueError: why" in json.loads(line)["exception"]
