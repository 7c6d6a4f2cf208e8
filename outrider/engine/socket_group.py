"""The ranks of a group whose engines are the compiled ones: one TCP connection between every two of them.

The compiled engine sends and receives on the sockets itself during a pass (`cpu/src/exchange.hpp`); between passes they
carry what this class sends. Both sides follow the same plan, so that nothing says where one message ends.
"""

from __future__ import annotations

import hmac
import logging
import socket
import struct
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from outrider.engine.group import RankLost
from outrider.engine.sharding import Shard

TIMEOUT_S = 15.0  # for another rank to arrive at the same operation; it is computing the same
MEETING_S = 120.0  # for all ranks to come to where they meet
GATHER_S = 3600.0  # for all ranks to have loaded
HELLO_S = 5.0  # within which a new connection sends its hello
MOST_BYTES = 1 << 28  # of a message

_HELLO = struct.Struct("!16s16sIIH")  # protocol, proof of the secret, rank, number of ranks, port that it listens on
_PROTOCOL = b"outrider ranks 1"
_LENGTH = struct.Struct("!Q")
_ADDRESS = struct.Struct("!64sH")  # host and port of a rank
_SIGN = b"\x01"  # of life

log = logging.getLogger(__name__)


class _Peer(NamedTuple):
    """A rank that has connected."""

    connection: socket.socket
    rank: int
    port: int  # that it listens on


class SocketGroup:
    """See `Group`."""

    def __init__(
        self,
        rank: int,
        of: int,
        meeting: str,
        *,
        host: str = "127.0.0.1",
        timeout_s: float = TIMEOUT_S,
        meeting_s: float = MEETING_S,
    ) -> None:
        """Meets the other ranks at `meeting`, "tcp://HOST:PORT#SECRET" on rank 0's host. Waits for all of them.

        `host`: this rank's own address, at which the others reach it. Who does not know the secret is turned away.

        Raises RankLost when they do not come within `meeting_s`.
        """
        self.shard = Shard(rank, of)
        self.timeout_s = timeout_s
        self._others: dict[int, socket.socket] = {}
        where = urlsplit(meeting)
        self._secret = where.fragment.encode()
        self._until = time.monotonic() + meeting_s
        try:
            with self._meeting():
                if rank:
                    self._join(host, str(where.hostname), where.port or 0)
                else:
                    self._welcome(host, where.port or 0)
        except BaseException:
            self.close()
            raise
        for connection in self._others.values():
            connection.settimeout(timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def sockets(self) -> list[int]:
        """File descriptors of the connections by rank; -1 for this one's own."""
        return [self._others[rank].fileno() if rank in self._others else -1 for rank in range(self.shard.of)]

    def send(self, message: NDArray[np.uint8]) -> None:
        for rank, connection in self._others.items():
            with self._reaching(rank):
                connection.sendall(_LENGTH.pack(len(message)) + message.tobytes())

    def receive(self) -> NDArray[np.uint8]:
        with self._reaching(0):
            (length,) = _LENGTH.unpack(_exactly(self._others[0], _LENGTH.size))
            if length > MOST_BYTES:
                raise ConnectionError(f"a message of {length} bytes")
            return np.frombuffer(_exactly(self._others[0], length), np.uint8)

    def beat(self) -> None:
        self._sign(self.timeout_s)

    def gather(self) -> None:
        self._sign(GATHER_S)

    def close(self) -> None:
        for connection in self._others.values():
            connection.close()
        self._others.clear()

    def _sign(self, patience_s: float) -> None:
        for rank, connection in self._others.items():
            with self._reaching(rank):
                connection.sendall(_SIGN)
        for rank, connection in self._others.items():
            with self._reaching(rank):
                connection.settimeout(patience_s)
                if _exactly(connection, 1) != _SIGN:
                    raise ConnectionError("it is at another operation")
                connection.settimeout(self.timeout_s)

    def _welcome(self, host: str, port: int) -> None:
        """Rank 0: waits for all others, and sends each where the others are."""
        peers: dict[int, _Peer] = {}
        with socket.create_server((host, port)) as server:
            while len(peers) < self.shard.of - 1:
                peer = self._accept(server, set(range(1, self.shard.of)) - peers.keys())
                if peer is not None:
                    peers[peer.rank] = peer
                    self._others[peer.rank] = peer.connection
        addresses = b"".join(
            _ADDRESS.pack(peers[rank].connection.getpeername()[0].encode(), peers[rank].port)
            for rank in range(1, self.shard.of)
        )
        for peer in peers.values():
            peer.connection.sendall(addresses)

    def _join(self, host: str, first: str, port: int) -> None:
        """Another rank: connects to rank 0, then to those between, and waits for those behind."""
        rank, of = self.shard.rank, self.shard.of
        with socket.create_server((host, 0)) as server:
            own = server.getsockname()[1]
            connection = self._others[0] = self._connect((first, port), own)
            connection.settimeout(self._left())
            addresses = _exactly(connection, _ADDRESS.size * (of - 1))
            for other, (name, at) in enumerate(_ADDRESS.iter_unpack(addresses), 1):
                if other < rank:
                    self._others[other] = self._connect((name.rstrip(b"\0").decode(), at), own)
            while len(self._others) < of - 1:
                peer = self._accept(server, set(range(rank + 1, of)) - self._others.keys())
                if peer is not None:
                    self._others[peer.rank] = peer.connection
        self._others = dict(sorted(self._others.items()))

    def _connect(self, address: tuple[str, int], own_port: int) -> socket.socket:
        """Connects, and tries again until a rank listens there."""
        while True:
            try:
                connection = socket.create_connection(address, min(HELLO_S, self._left()))
            except OSError:
                self._left()
                time.sleep(0.02)
                continue
            connection.sendall(
                _HELLO.pack(_PROTOCOL, self._proof(self.shard.rank), self.shard.rank, self.shard.of, own_port)
            )
            return connection

    def _accept(self, server: socket.socket, expected: Container[int]) -> _Peer | None:
        """The next connection, if it is one of the `expected` ranks'."""
        server.settimeout(self._left())
        connection, address = server.accept()
        connection.settimeout(min(HELLO_S, self._left()))
        with suppress(OSError):
            protocol, proof, rank, of, port = _HELLO.unpack(_exactly(connection, _HELLO.size))
            known = protocol == _PROTOCOL and hmac.compare_digest(proof, self._proof(rank))
            if known and of == self.shard.of and rank in expected:
                return _Peer(connection, rank, port)
        connection.close()
        log.warning("%s connected, and is no rank that this group waits for", address[0])
        return None

    def _proof(self, rank: int) -> bytes:
        return hmac.digest(self._secret, f"{rank} of {self.shard.of}".encode(), sha256)[:16]

    def _left(self) -> float:
        """Seconds. Raises TimeoutError when there are none."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("not all ranks have come")
        return left

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RankLost(f"rank {self.shard.rank} of {self.shard.of} has not met the others: {error}") from error

    @contextmanager
    def _reaching(self, rank: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.lost(f"rank {rank}: {error}") from error

    def lost(self, why: str) -> RankLost:
        """The error for it."""
        return RankLost(f"rank {self.shard.rank} of {self.shard.of} has lost another one: {why}")


def _exactly(connection: socket.socket, count: int) -> bytes:
    """That many bytes. Raises ConnectionError when there are fewer; TimeoutError when they do not come in time."""
    until = time.monotonic() + (connection.gettimeout() or 0.0)
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("it has closed its connection")
        parts += part
        if len(parts) < count and time.monotonic() > until:
            raise TimeoutError("timed out")
    return bytes(parts)
