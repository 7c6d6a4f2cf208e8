"""`rediss://`: redis-py's options for TLS in a URL reach it through us. The embedded server speaks none, so something
in front of a real one does."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from outrider.errors import Unavailable
from outrider.rpc.certificates import make
from outrider.store.api_keys import Keys
from outrider.store.redis.client import connect, ping


@asynccontextmanager
async def in_tls(redis_url: str, folder: Path) -> AsyncIterator[str]:
    """The server's "host:port" for TLS, with a router's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "router.pem", folder / "router.key")

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, here = await asyncio.open_unix_connection(urlsplit(redis_url).path)
        await asyncio.gather(pass_on(reader, here), pass_on(there, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def url(redis_url: str, address: str, ca: Path) -> str:
    query = urlsplit(redis_url).query
    return f"rediss://{address}/0?{query and query + '&'}ssl_ca_certs={ca}"


async def test_redis_is_spoken_to_by_tls(redis_url: str, tmp_path: Path) -> None:
    make(tmp_path)
    async with in_tls(redis_url, tmp_path) as address:
        async with connect(url(redis_url, address, tmp_path / "ca.pem")) as client:
            keys = Keys(client)
            secret, key = await keys.add("acme")
            assert await keys.find(secret) == key
        async with connect(redis_url) as client:
            assert await Keys(client).listed() == [key]


async def test_a_redis_of_another_ca_is_refused(redis_url: str, tmp_path: Path) -> None:
    make(tmp_path / "its")
    make(tmp_path / "ours")
    async with (
        in_tls(redis_url, tmp_path / "its") as address,
        connect(url(redis_url, address, tmp_path / "ours" / "ca.pem")) as client,
    ):
        with pytest.raises(Unavailable, match=r"cannot be reached .*[Cc]ert"):
            await ping(client)
