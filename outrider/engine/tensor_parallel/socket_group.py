"""The tensor-parallel group of compiled engines: one TCP connection between every two ranks.

During a pass the compiled engine itself uses the sockets (`cpu/src/exchange.hpp`); between passes this class does. Both
ends of a connection follow the same plan, so messages of the engine need no lengths.
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

from outrider.engine.tensor_parallel.group import RankLost
from outrider.engine.tensor_parallel.sharding import Shard

TIMEOUT_S = 15.0  # for another rank to arrive at the same operation
RENDEZVOUS_S = 120.0  # for all ranks to connect
GATHER_S = 3600.0  # for all ranks to have loaded
HELLO_S = 5.0  # for a new connection to send its hello
MOST_BYTES = 1 << 28  # maximum size of a message

_HELLO = struct.Struct("!16s16sIIH")  # protocol, proof of the secret, rank, number of ranks, listening port
_PROTOCOL = b"outrider ranks 1"
_LENGTH = struct.Struct("!Q")
_ADDRESS = struct.Struct("!64sH")  # host and port of a rank
_SIGN = b"\x01"  # sign of life

log = logging.getLogger(__name__)


class _Peer(NamedTuple):
    """A rank that has connected."""

    connection: socket.socket
    rank: int
    port: int  # the port on which it accepts connections


class SocketGroup:
    """A `Group` over sockets."""

    def __init__(
        self,
        rank: int,
        of: int,
        rendezvous: str,
        *,
        host: str = "127.0.0.1",
        timeout_s: float = TIMEOUT_S,
        rendezvous_s: float = RENDEZVOUS_S,
    ) -> None:
        """Connect to the other ranks at `rendezvous`, "tcp://HOST:PORT#SECRET" on rank 0's host. Wait for all of them.

        `host`: the address at which the other ranks reach this one. Connections without the secret are refused.

        Raises RankLost when not all ranks connect within `rendezvous_s`.
        """
        self.shard = Shard(rank, of)
        self.timeout_s = timeout_s
        self._others: dict[int, socket.socket] = {}
        address = urlsplit(rendezvous)
        self._secret = address.fragment.encode()
        self._deadline = time.monotonic() + rendezvous_s
        try:
            with self._connecting():
                if rank:
                    self._connect_to_rank_0(host, str(address.hostname), address.port or 0)
                else:
                    self._accept_all(host, address.port or 0)
        except BaseException:
            self.close()
            raise
        for connection in self._others.values():
            connection.settimeout(timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def sockets(self) -> list[int]:
        """File descriptors of the connections by rank; -1 for this rank itself."""
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

    def heartbeat(self) -> None:
        self._exchange_signs(self.timeout_s)

    def barrier(self) -> None:
        self._exchange_signs(GATHER_S)

    def close(self) -> None:
        for connection in self._others.values():
            connection.close()
        self._others.clear()

    def _exchange_signs(self, timeout_s: float) -> None:
        """Send a sign of life to all other ranks, and wait up to `timeout_s` for that of each."""
        for rank, connection in self._others.items():
            with self._reaching(rank):
                connection.sendall(_SIGN)
        for rank, connection in self._others.items():
            with self._reaching(rank):
                connection.settimeout(timeout_s)
                if _exactly(connection, 1) != _SIGN:
                    raise ConnectionError("the other rank is at another operation")
                connection.settimeout(self.timeout_s)

    def _accept_all(self, host: str, port: int) -> None:
        """On rank 0: wait for all other ranks, then send each the addresses of all."""
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

    def _connect_to_rank_0(self, host: str, first: str, port: int) -> None:
        """On another rank: connect to rank 0 and all ranks with lower numbers, and wait for the others."""
        rank, of = self.shard.rank, self.shard.of
        with socket.create_server((host, 0)) as server:
            own_port = server.getsockname()[1]
            connection = self._others[0] = self._connect((first, port), own_port)
            connection.settimeout(self._remaining_s())
            addresses = _exactly(connection, _ADDRESS.size * (of - 1))
            for other, (name, at) in enumerate(_ADDRESS.iter_unpack(addresses), 1):
                if other < rank:
                    self._others[other] = self._connect((name.rstrip(b"\0").decode(), at), own_port)
            while len(self._others) < of - 1:
                peer = self._accept(server, set(range(rank + 1, of)) - self._others.keys())
                if peer is not None:
                    self._others[peer.rank] = peer.connection
        self._others = dict(sorted(self._others.items()))

    def _connect(self, address: tuple[str, int], own_port: int) -> socket.socket:
        """Connect to a rank, and retry until it listens there."""
        while True:
            try:
                connection = socket.create_connection(address, min(HELLO_S, self._remaining_s()))
            except OSError:
                self._remaining_s()  # raises when the time is over
                time.sleep(0.02)
                continue
            connection.sendall(
                _HELLO.pack(_PROTOCOL, self._proof(self.shard.rank), self.shard.rank, self.shard.of, own_port)
            )
            return connection

    def _accept(self, server: socket.socket, expected: Container[int]) -> _Peer | None:
        """Wait for a connection; return it where it comes from one of the `expected` ranks, else None."""
        server.settimeout(self._remaining_s())
        connection, address = server.accept()
        connection.settimeout(min(HELLO_S, self._remaining_s()))
        with suppress(OSError):
            protocol, proof, rank, of, port = _HELLO.unpack(_exactly(connection, _HELLO.size))
            known = protocol == _PROTOCOL and hmac.compare_digest(proof, self._proof(rank))
            if known and of == self.shard.of and rank in expected:
                return _Peer(connection, rank, port)
        connection.close()
        log.warning("refused a connection from %s: it is no rank that this group waits for", address[0])
        return None

    def _proof(self, rank: int) -> bytes:
        """Return the proof with which a rank shows that it has the secret."""
        return hmac.digest(self._secret, f"{rank} of {self.shard.of}".encode(), sha256)[:16]

    def _remaining_s(self) -> float:
        """Return the seconds that remain to connect. Raises TimeoutError when there are none."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("not all ranks have connected")
        return remaining

    @contextmanager
    def _connecting(self) -> Iterator[None]:
        """Raise RankLost where connecting fails."""
        try:
            yield
        except OSError as error:
            raise RankLost(f"rank {self.shard.rank} of {self.shard.of} could not reach the others: {error}") from error

    @contextmanager
    def _reaching(self, rank: int) -> Iterator[None]:
        """Raise RankLost where an exchange with a rank fails."""
        try:
            yield
        except OSError as error:
            raise self.lost(f"rank {rank}: {error}") from error

    def lost(self, why: str) -> RankLost:
        """Return the error for a lost rank."""
        return RankLost(f"rank {self.shard.rank} of {self.shard.of} has lost another one: {why}")


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Return that many bytes. Raises ConnectionError when the connection ends, TimeoutError when they come too late."""
    deadline = time.monotonic() + (connection.gettimeout() or 0.0)
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the other rank has closed its connection")
        parts += part
        if len(parts) < count and time.monotonic() > deadline:
            raise TimeoutError("timed out")
    return bytes(parts)
