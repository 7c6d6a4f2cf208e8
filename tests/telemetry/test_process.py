"""A server is as well without anybody who listens to what it tells."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from outrider.errors import ConfigError
from outrider.telemetry.process import telling
from tests.fleet.conftest import free_port


def test_a_collector_that_is_not_there_holds_nobody_up() -> None:
    """Left to itself, the exporter tries again for half a minute."""
    told = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", "OTEL_TRACES_SAMPLER": "always_on"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.telemetry.caller", f"127.0.0.1:{free_port()}", "5"],
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **told},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout.splitlines()[1:] == ["Unavailable"]


def test_a_page_that_cannot_be_had_is_the_users_mistake() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"metrics: cannot bind {address}"), telling("test", "test-1", address):
            pass
