"""Pinned dependencies are held against advisories where the service answers; where it does not, nothing waits."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests import audit

ADVISORY = {
    "id": "GHSA-aaaa-bbbb-cccc",
    "modified": "2026-01-01T00:00:00Z",
    "details": "It is bad.",
    "affected": [
        {
            "package": {"name": "weak", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.0"}]}],
            "versions": ["1.0"],
        }
    ],
}


class Advisories(BaseHTTPRequestHandler):
    """Answers as osv.dev does; `weak` 1.0 is vulnerable."""

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = query["package"]["name"] == "weak" and query["version"] == "1.0"
        body = json.dumps({"vulns": [ADVISORY]} if found else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (its name there)
        """Log nothing."""


@pytest.fixture
def service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Advisories)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/query"
    server.shutdown()
    server.server_close()


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "pinned.txt").write_text("sound==3.1\nweak==1.0\n")
    (tmp_path / "settings.toml").write_text("[tool.audit]\nignore = []\n")
    names = {"requirement": "pinned.txt", "settings": "settings.toml", "passed": "passed"}
    return [part for name, file in names.items() for part in (f"--{name}", str(tmp_path / file))]


def test_a_vulnerable_version_fails_the_audit_and_is_named(
    service: str, files: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ["--quick", "--service", service, *files]
    assert audit.main(asked) == 1
    shown = capfd.readouterr().out
    assert "weak" in shown
    assert "GHSA-aaaa-bbbb-cccc" in shown
    assert "sound" not in shown
    (tmp_path / "settings.toml").write_text('[tool.audit]\nignore = ["GHSA-aaaa-bbbb-cccc"]  # it is not called\n')
    assert audit.main(asked) == 0
    nowhere = ["--quick", "--service", "http://127.0.0.1:9", *files]
    capfd.readouterr()
    assert (audit.main(nowhere), capfd.readouterr().out) == (0, "")  # it has just passed
    (tmp_path / "pinned.txt").write_text("sound==3.2\n")
    assert audit.main(nowhere) == 0
    assert capfd.readouterr().out.startswith("audit: not run")


def test_a_service_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, files: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit, "PATIENCE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts nobody
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert audit.main(["--quick", "--service", address, *files]) == 0
        (line,) = capfd.readouterr().out.splitlines()
        assert line.startswith(f"audit: not run, because {address} cannot be reached")
        assert audit.main(["--service", address, *files]) == 1
