"""The settings of a client's connection, from its arguments, else from the environment, else from a profile; and the
credentials that follow from them: an API key, and TLS to the router."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypedDict

from outrider.client._profiles import ConnectionSettings, profile_of
from outrider.errors import ConfigError
from outrider.rpc.tls import Tls, is_loopback

Metadata = tuple[tuple[str, str], ...]  # of a call

ROUTER = "127.0.0.1:7070"
VARIABLES = tuple(f"OUTRIDER_{name}" for name in ("ROUTER", "API_KEY", "API_KEY_FILE", "CA", "SERVER_NAME"))


class ConnectionOptions(TypedDict, total=False):
    """How to reach a router. All keywords are optional; one that is left out or None comes from the environment or a
    profile."""

    profile: str | None  # name in the profiles file; without a router's address, its profile "default" is used
    api_key: str | None  # if the router requires one; "" sends none
    ca: str | Path | None  # PEM file with the CA of the router's certificate; the connection uses TLS then
    tls: bool | None  # True without a `ca`: trust the system's CAs; False: no TLS, even with a key
    server_name: str | None  # name that the router's certificate must have; "": the host of its address


@dataclass(frozen=True, slots=True)
class Connection:
    """The settings of a connection, complete."""

    address: str = ROUTER  # HOST:PORT, or several in gRPC's syntax
    api_key: str = field(default="", repr=False)
    ca: Path | None = None
    tls: bool | None = None  # None: use TLS if there is a `ca`
    server_name: str = ""

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit() or host.startswith(("http://", "https://")):
            raise ConfigError(
                f"address: is {self.address!r}, must be HOST:PORT of a router, for example {ROUTER}; "
                "for a gateway's URL take a client of OpenAI's API"
            )


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


def resolve(
    address: str | None = None,
    *,
    profile: str | None = None,
    api_key: str | None = None,
    ca: str | Path | None = None,
    tls: bool | None = None,
    server_name: str | None = None,
) -> Connection:
    """Return the settings from the arguments, the environment and a profile, in this order of precedence.

    A profile that an argument names takes precedence over the environment. A profile that is named less explicitly
    than the address is ignored, because its key belongs to the profile's router. Raises ConfigError, which names the
    file and the key in it, or the variable.
    """
    arguments = ConnectionSettings("", address, api_key, None, None if ca is None else Path(ca), tls, server_name)
    environment = _environment()
    saved = profile_of(
        profile, address_in_arguments=address is not None, address_in_environment=environment.router is not None
    )
    others = [environment] if saved is None else [saved, environment] if profile else [environment, saved]
    sources = [arguments, *others]
    trusted_ca, use_tls = _trust(sources)
    return Connection(
        address=next((source.router for source in sources if source.router is not None), ROUTER),
        api_key=next((key for source in sources if (key := source.key()) is not None), ""),
        ca=trusted_ca,
        tls=use_tls,
        server_name=next((source.server_name for source in sources if source.server_name is not None), ""),
    )


def _environment() -> ConnectionSettings:
    """Return the settings in environment variables. An empty variable counts as not set."""
    router, key, file, ca, server_name = (os.environ.get(name) or None for name in VARIABLES)
    if key and file:
        raise ConfigError("OUTRIDER_API_KEY: is set beside OUTRIDER_API_KEY_FILE; unset one of them")
    return ConnectionSettings(
        "OUTRIDER_API_KEY_FILE", router, key, Path(file) if file else None, Path(ca) if ca else None, None, server_name
    )


def _trust(sources: Sequence[ConnectionSettings]) -> tuple[Path | None, bool | None]:
    """Return the CA and whether to use TLS, from sources in order of precedence.

    The first source that sets either of the two decides; `tls=True` without a CA takes the CA of a later source.
    """
    for source in sources:
        if source.tls is False and source.ca is not None:
            raise ConfigError("tls: is False, and there is a `ca`; leave out one of them")
        if source.ca is not None:
            return source.ca, source.tls
        if source.tls is False:
            return None, False
        if source.tls:
            later = sources[sources.index(source) + 1 :]
            return next((other.ca for other in later if other.ca is not None), None), True
    return None, None


def key_metadata(key: str) -> Metadata:
    """Return the metadata that carries an API key; empty without one. Raises ConfigError for what cannot be a key."""
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("api_key: must be the text that `outrider keys add` printed, and nothing else")
    return (("authorization", f"Bearer {key}"),) if key else ()


def _is_local(address: str) -> bool:
    """Return whether the address, or each of several in it, is a loopback address."""
    listed = address.removeprefix("ipv4:").removeprefix("ipv6:").split(",")
    return all(is_loopback(one.rpartition(":")[0]) for one in listed)
