"""A server works as well without a collector that receives its telemetry."""

from __future__ import annotations

import math
import random
import socket
import subprocess
import sys

import pytest
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from outrider.errors import ConfigError
from outrider.telemetry.process import _sampler, exporting_telemetry
from tests.fleet.conftest import free_port


def test_a_missing_collector_delays_no_call() -> None:
    """Left to itself, the exporter tries again for half a minute."""
    settings = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", "OTEL_TRACES_SAMPLER": "always_on"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.telemetry.caller", f"127.0.0.1:{free_port()}", "5"],
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **settings},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout.splitlines()[1:] == ["Unavailable"]


def test_one_request_in_twenty_is_traced_unless_its_caller_or_the_environment_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OTEL_TRACES_SAMPLER", raising=False)
    sampler, dice = _sampler(), random.Random(1)
    assert sampler is not None

    def traced(caller: bool | None) -> int:
        """How many of 10,000 requests; `caller`: whether the caller's own trace is kept, None: it has none."""
        count = 0
        for _ in range(10_000):
            trace_id, context = dice.getrandbits(128), Context()
            if caller is not None:
                span = SpanContext(trace_id, 1, is_remote=True, trace_flags=TraceFlags(int(caller)))
                context = set_span_in_context(NonRecordingSpan(span), context)
            count += sampler.should_sample(context, trace_id, "request").decision.is_sampled()
        return count

    assert traced(None) == pytest.approx(500, abs=3 * math.sqrt(10_000 * 0.05 * 0.95))  # three deviations of a binomial
    assert (traced(True), traced(False)) == (10_000, 0)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    assert _sampler() is None


def test_a_page_that_cannot_be_had_is_the_users_mistake() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(ConfigError, match=f"metrics: cannot bind {address}"),
            exporting_telemetry("test", "test-1", address),
        ):
            pass
