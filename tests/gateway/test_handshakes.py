"""A connection that does not finish its TLS handshake counts as one, and ends in time."""

from __future__ import annotations

import asyncio
import ssl
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from outrider.gateway.transport import tls_connections
from outrider.rpc.certificates import make
from tests.gateway.conftest import gateway_harness
from tests.gateway.process import gateway_process
from tests.router.rig import running_router

MOST = 8  # connections
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the first bytes of a ClientHello


class Silent:
    """A connection that begins a handshake, or not even that, and sends no more."""

    def __init__(self, address: str, sent: bytes) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._sent = sent
        self.seconds = 0.0  # until it was closed

    async def run(self) -> None:
        """Return when the gateway has closed the connection."""
        began = time.monotonic()
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            with suppress(ConnectionError):
                writer.write(self._sent)
                while await reader.read(1024):
                    pass
        finally:
            self.seconds = time.monotonic() - began
            writer.transport.abort()


async def held(address: str, count: int, bound_s: float) -> list[float]:
    """Seconds after which each of `count` silent connections was closed, in order."""
    silent = [Silent(address, HELLO if number % 2 else b"") for number in range(count)]
    async with asyncio.timeout(bound_s):
        await asyncio.gather(*(each.run() for each in silent))
    return sorted(each.seconds for each in silent)


async def counted_no_longer(url: str, trusting: ssl.SSLContext) -> None:
    """Return when the gateway has room: a caller sees his connection end before the gateway has counted that."""
    async with asyncio.timeout(5):
        while True:
            with suppress(httpx.ConnectError):
                async with httpx.AsyncClient(verify=trusting) as web:
                    await web.get(url)
                    return


def flags(folder: Path) -> dict[str, Path]:
    make(folder)
    return {"cert": folder / "gateway.pem", "key": folder / "gateway.key"}


async def test_connections_in_their_handshake_count_and_end_in_ten_seconds(redis_url: str, tmp_path: Path) -> None:
    named = [str(part) for name, file in flags(tmp_path).items() for part in (f"--{name}", file)]
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    async with (
        running_router(redis_url) as rig,
        gateway_process(rig.address, *named, "--max-connections", str(MOST)) as gateway,
    ):
        seconds = await held(gateway.address, 200, 30)
        assert seconds[-MOST - 1] < 5, "those beyond the number are closed at once"
        assert all(9.5 < each < 15 for each in seconds[-MOST:])
        await counted_no_longer(f"https://{gateway.address}/health", trusting)
        for _ in range(32):  # new connections, each with a handshake of its own
            async with httpx.AsyncClient(verify=trusting) as web:
                assert (await web.get(f"https://{gateway.address}/health")).status_code == 200


async def test_silent_handshakes_leave_no_trace_and_served_connections_are_counted(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_connections, "HANDSHAKE_S", 2.0)
    certificate = flags(tmp_path)
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    async with gateway_harness(redis_url, gateway={**certificate, "max_connections": 2}) as harness:
        address = harness.url.removeprefix("http://")
        async with httpx.AsyncClient(verify=trusting) as web:
            assert (await web.get(f"https://{address}/health")).status_code == 200
            seconds = await held(address, 4, 15)  # one beside the connection that is open
            assert seconds[-2] < 1.5 < seconds[-1]
            assert (await web.get(f"https://{address}/health")).status_code == 200
        for _ in range(4):  # what has ended counts no longer
            async with httpx.AsyncClient(verify=trusting) as web:
                assert (await web.get(f"https://{address}/health")).status_code == 200


async def test_plain_http_at_a_port_of_tls_is_no_error_of_the_gateway(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway_harness(redis_url, gateway=flags(tmp_path)) as harness:
        address = harness.url.removeprefix("http://")
        async with httpx.AsyncClient() as web:
            with pytest.raises(httpx.HTTPError):
                await web.get(f"http://{address}/health")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
