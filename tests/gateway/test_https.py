"""A gateway's certificate is renewed while it serves."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.rpc.certificates import make, renew
from tests.gateway.conftest import gateway_harness


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "ca.pem")


def presented(folder: Path, port: int, name: str | None) -> str:
    """The certificate that a new connection gets; `name`: of the server, that the client gives."""
    context = trusting(folder)
    context.check_hostname = name is not None
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"")


async def test_new_connections_get_renewed_files_and_open_connections_continue(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    metrics: dict[str, Callable[[], float]] = {}
    monkeypatch.setattr("outrider.gateway.metrics.register_metric", metrics.__setitem__)
    cert, key = tmp_path / "gateway.pem", tmp_path / "gateway.key"
    async with gateway_harness(redis_url, gateway={"cert": cert, "key": key}) as harness:
        port = int(harness.url.rpartition(":")[2])
        connected = http.client.HTTPSConnection("127.0.0.1", port, context=trusting(tmp_path), timeout=10)

        def asked(path: str) -> int:
            connected.request("GET", path)
            with connected.getresponse() as answer:
                answer.read()
                return answer.status

        def shown() -> set[str]:
            return {presented(tmp_path, port, name) for name in (None, "localhost")}

        assert await asyncio.to_thread(asked, "/health") == 200
        held = connected.sock
        before = cert.read_text()
        assert await asyncio.to_thread(shown) == {before}
        cert.write_text("half a certif")
        assert await asyncio.to_thread(shown) == {before}
        cert.write_text(before)
        renew(tmp_path, days=5)
        assert cert.read_text() != before
        assert await asyncio.to_thread(shown) == {cert.read_text()}
        assert await asyncio.to_thread(asked, "/health") == 200
        assert connected.sock is held
        assert metrics["outrider.certificate.expiry"]() - time.time() == pytest.approx(5 * 86400, abs=600)
        connected.close()
