"""An HTTP/2 client that reads as slowly as it likes: gRPC's own ones allow no window of a byte."""

from __future__ import annotations

import asyncio
import struct
from types import TracebackType
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4


class Http2Client:
    """One connection, whose calls begin with a flow-control window of a given size."""

    def __init__(self, address: str, *, window: int = 65535) -> None:
        self._address = address
        self._window = window
        self._stream = -1
        self.received = 0  # bytes of answers
        self.ended: set[int] = set()  # streams that the server has ended

    async def __aenter__(self) -> Self:
        host, _, port = self._address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        self._writer.write(PREFACE + _frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, self._window)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.transport.abort()

    def call(self, method: str, message: bytes, timeout: str = "1H") -> int:
        """Opens a call of one message. Return its stream. `timeout`: as gRPC has it in a header, for example "2S"."""
        self._stream += 2
        fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": self._address}
        headers = b"".join(
            map(
                _header,
                (fields | {"content-type": "application/grpc", "te": "trailers", "grpc-timeout": timeout}).items(),
            )
        )
        body = b"\0" + struct.pack(">I", len(message)) + message
        self._writer.write(_frame(HEADERS, END_HEADERS, self._stream, headers))
        self._writer.write(_frame(DATA, END_STREAM, self._stream, body))
        return self._stream

    async def drip(self, size: int, pause_s: float) -> None:
        """Answers pings, and allows `size` bytes more of a call a pause after each piece of it, until cancelled or the
        server has gone. A size of 0: the first window is all."""
        while True:
            try:
                length, kind, flags, stream = await self._head()
                payload = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            if kind == SETTINGS and not flags & ACK:
                self._writer.write(_frame(SETTINGS, ACK, 0, b""))
            elif kind == PING and not flags & ACK:
                self._writer.write(_frame(PING, ACK, 0, payload))
            elif kind == DATA:
                self.received += length
                if size:
                    asyncio.get_running_loop().call_later(pause_s, self._allow, stream, size)
            if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                self.ended.add(stream)

    def _allow(self, stream: int, size: int) -> None:
        for number in (0, stream) if not self._writer.is_closing() else ():
            self._writer.write(_frame(WINDOW_UPDATE, 0, number, struct.pack(">I", size)))

    async def _head(self) -> tuple[int, int, int, int]:
        head = await self._reader.readexactly(9)
        return int.from_bytes(head[:3], "big"), head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _header(field: tuple[str, str]) -> bytes:
    """A literal header field without indexing (RFC 7541, section 6.2.2)."""
    name, value = (text.encode() for text in field)
    return b"\0" + _short(name) + _short(value)


def _short(text: bytes) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text
