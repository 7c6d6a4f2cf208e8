"""How a client shows who it is, and knows whom it talks to."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from outrider.errors import ConfigError
from outrider.rpc.tls import Tls, is_loopback

API_KEY = "OUTRIDER_API_KEY"
CA = "OUTRIDER_CA"


@dataclass(frozen=True, slots=True)
class Access:
    """What a connection needs beside its address."""

    tls: Tls | None = None
    server_name: str = ""  # that the router's certificate must have; empty: the address's own
    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # of every call

    @classmethod
    def of(
        cls, address: str, api_key: str | None, ca: str | Path | None, tls: bool | None, server_name: str = ""
    ) -> Self:
        """From what the caller gave, or else the environment has. Raises ConfigError."""
        key = os.environ.get(API_KEY, "") if api_key is None else api_key
        authority = (os.environ.get(CA) or None) if ca is None and tls is not False else ca
        if authority is not None and tls is False:
            raise ConfigError("tls: is False, and there is a `ca`; leave out one of them")
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("api_key: must be the text that `outrider keys add` printed, and nothing else")
        if tls is None and authority is None and key and not _is_local(address):
            raise ConfigError(
                "api_key: would cross the network for anybody to read; give `ca` (or set OUTRIDER_CA), tls=True for a "
                "certificate that the web knows, or tls=False if the way there is safe"
            )
        secured = tls or authority is not None
        return cls(
            Tls.client(None if authority is None else Path(authority)) if secured else None,
            server_name,
            (("authorization", f"Bearer {key}"),) if key else (),
        )


def _is_local(address: str) -> bool:
    """Whether an address, or all of several, are this machine's own."""
    listed = address.removeprefix("ipv4:").removeprefix("ipv6:").split(",")
    return all(is_loopback(one.rpartition(":")[0]) for one in listed)
