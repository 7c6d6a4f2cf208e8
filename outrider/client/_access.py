"""Authentication of a client's connection: its API key, and TLS to the router."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from outrider.client._connection import Connection
from outrider.errors import ConfigError
from outrider.rpc.tls import Tls, is_loopback

Metadata = tuple[tuple[str, str], ...]  # of a call


@dataclass(frozen=True, slots=True)
class Access:
    """The credentials of a connection: everything that it needs beside its address."""

    tls: Tls | None = None
    server_name: str = ""  # name that the router's certificate must have; empty: the host of the address
    metadata: Metadata = field(default=(), repr=False)  # of every call

    @classmethod
    def of(cls, connection: Connection) -> Self:
        """Return the credentials of a connection. Raises ConfigError for a key that is invalid or would not be safe."""
        key, use_tls = connection.api_key, connection.tls or connection.ca is not None
        metadata = key_metadata(key)
        if not use_tls and connection.tls is None and key and not _is_local(connection.address):
            raise ConfigError(
                "api_key: would cross the network for anybody to read; give `ca` (or set OUTRIDER_CA), tls=True for a "
                "certificate that the web knows, or tls=False if the way there is safe"
            )
        return cls(
            Tls.client(connection.ca) if use_tls else None,
            connection.server_name,
            metadata,
        )


def key_metadata(key: str) -> Metadata:
    """Return the metadata that carries an API key; empty without one. Raises ConfigError for what cannot be a key."""
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("api_key: must be the text that `outrider keys add` printed, and nothing else")
    return (("authorization", f"Bearer {key}"),) if key else ()


def _is_local(address: str) -> bool:
    """Return whether the address, or each of several in it, is a loopback address."""
    listed = address.removeprefix("ipv4:").removeprefix("ipv6:").split(",")
    return all(is_loopback(one.rpartition(":")[0]) for one in listed)
