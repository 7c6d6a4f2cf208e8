"""`outrider gateway` as a command: what is wrong is one line."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.rpc.certificates import make


def refused(*arguments: str) -> str:
    """The error text of a command that does not start."""
    command = [sys.executable, "-m", "outrider.cli", "gateway", "--listen", "127.0.0.1:0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env={**os.environ})
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        message = refused("--listen", address)
    assert message == f"outrider: listen: cannot use {address} (Address already in use); choose another\n"


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (("--cert", "gateway.pem"), "cert and key go together"),
        (("--cert", "gateway.pem", "--key", "router.key"), "must be a certificate and its own key"),
        (("--ca", "none.pem"), "none.pem"),
        (("--router", "192.0.2.1:7070"), "would cross the network"),
        (("--router", "nowhere"), "must be HOST:PORT"),
    ],
)
def test_impossible_gateway_settings_are_refused_in_one_line(
    flags: tuple[str, ...], fragment: str, tmp_path: Path
) -> None:
    make(tmp_path)
    found = [str(tmp_path / flag) if flag.endswith((".pem", ".key")) else flag for flag in flags]
    shown = refused(*found)
    assert shown.startswith("outrider: ")
    assert fragment in shown
    assert shown.count("\n") == 1
