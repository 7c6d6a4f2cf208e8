"""Which router a client speaks to, and how: from its arguments, or else the environment, or else a profile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from outrider.client._profiles import Saved, profile_of
from outrider.errors import ConfigError

ROUTER = "127.0.0.1:7070"
VARIABLES = tuple(f"OUTRIDER_{name}" for name in ("ROUTER", "API_KEY", "API_KEY_FILE", "CA", "SERVER_NAME"))


class Connecting(TypedDict, total=False):
    """How to reach a router, all by keyword, all optional; what is left out, or None, is looked up."""

    profile: str | None  # its name in the file of profiles; a file's "default" is taken where nothing names a router
    api_key: str | None  # where the router demands one; "" sends none
    ca: str | Path | None  # a file in PEM: who signed the router's certificate; the connection is by TLS then
    tls: bool | None  # True without a `ca`: believe whom the web does; False: none, though there is a key
    server_name: str | None  # that the router's certificate must have; "": its address's own


@dataclass(frozen=True, slots=True)
class Connection:
    """All of it, looked up."""

    address: str = ROUTER  # HOST:PORT, or several as gRPC writes them
    api_key: str = field(default="", repr=False)
    ca: Path | None = None
    tls: bool | None = None  # None: with a `ca`
    server_name: str = ""

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"address: is {self.address!r}, must be HOST:PORT, for example {ROUTER}")


def resolve(
    address: str | None = None,
    *,
    profile: str | None = None,
    api_key: str | None = None,
    ca: str | Path | None = None,
    tls: bool | None = None,
    server_name: str | None = None,
) -> Connection:
    """What arguments say; what they leave out, what the environment says; what that leaves out, what the profile says,
    unless an argument names it, which makes it the stronger one.

    A profile that is named less explicitly than the address is not looked at: its key is for its own router. Raises
    ConfigError, which names the file and the key in it, or the variable.
    """
    arguments = Saved("", address, api_key, None, None if ca is None else Path(ca), tls, server_name)
    environment = _environment()
    saved = profile_of(profile, given=address is not None, elsewhere=environment.router is not None)
    others = [environment] if saved is None else [saved, environment] if profile else [environment, saved]
    sources = [arguments, *others]
    believed, secured = _trust(sources)
    return Connection(
        address=next((source.router for source in sources if source.router is not None), ROUTER),
        api_key=next((key for source in sources if (key := source.key()) is not None), ""),
        ca=believed,
        tls=secured,
        server_name=next((source.server_name for source in sources if source.server_name is not None), ""),
    )


def _environment() -> Saved:
    """What it says; a variable that is empty says nothing."""
    router, key, file, ca, server_name = (os.environ.get(name) or None for name in VARIABLES)
    if key and file:
        raise ConfigError("OUTRIDER_API_KEY: is set beside OUTRIDER_API_KEY_FILE; unset one of them")
    return Saved(
        "OUTRIDER_API_KEY_FILE", router, key, Path(file) if file else None, Path(ca) if ca else None, None, server_name
    )


def _trust(sources: Sequence[Saved]) -> tuple[Path | None, bool | None]:
    """The CA and whether there is TLS. Who says the one without the other overrules both of whoever is weaker."""
    for source in sources:
        if source.tls is False and source.ca is not None:
            raise ConfigError("tls: is False, and there is a `ca`; leave out one of them")
        if source.ca is not None:
            return source.ca, source.tls
        if source.tls is False:
            return None, False
        if source.tls:
            weaker = sources[sources.index(source) + 1 :]
            return next((other.ca for other in weaker if other.ca is not None), None), True
    return None, None
