"""Profiles: named connections in a file.

[default]
router = "router.example:7070"
ca = "ca.pem"                      # relative to this file, like api_key_file
api_key_file = "key"               # file with the key that `outrider keys add` printed
server_name = "router.outrider"
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from outrider.errors import ConfigError

DEFAULT = "default"
FILE = "~/.config/outrider/profiles.toml"
_KINDS = {"router": str, "api_key_file": str, "ca": str, "tls": bool, "server_name": str}
_PATHS = ("api_key_file", "ca")
_TYPES = {str: "text", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """The settings of a connection from one source; None: the source does not set it."""

    name: str  # of the setting `api_key_file` in this source, for errors
    router: str | None = None
    api_key: str | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    ca: Path | None = None
    tls: bool | None = None
    server_name: str | None = None

    def key(self) -> str | None:
        """Return the key, or the key in `api_key_file`; None if neither is set. Raises ConfigError."""
        if self.api_key_file is None:
            return self.api_key
        try:
            key = self.api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is no text"
            raise ConfigError(f"{self.name}: {self.api_key_file} cannot be read: {reason}") from None
        if not key:
            raise ConfigError(f"{self.name}: {self.api_key_file} is empty; `outrider keys add` prints a key")
        return key


def profile_of(
    name: str | None, *, address_in_arguments: bool, address_in_environment: bool
) -> ConnectionSettings | None:
    """Return the profile `name`, else that of OUTRIDER_PROFILE, else the default profile if a file has one, else None.

    If an argument gives the address, only an argument may name a profile. If the environment gives the address, the
    default profile is not used. Raises ConfigError.
    """
    if name is None and address_in_arguments:
        return None
    named = name or os.environ.get("OUTRIDER_PROFILE") or None
    if named is None and address_in_environment:
        return None
    chosen = os.environ.get("OUTRIDER_PROFILES")
    file = Path(chosen or FILE).expanduser()
    if named is None and not chosen and not file.exists():
        return None
    try:
        profiles = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; OUTRIDER_PROFILES names another file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from None
    if named is None and DEFAULT not in profiles:
        return None
    return _parsed(file, named or DEFAULT, profiles)


def _parsed(file: Path, name: str, profiles: dict[str, Any]) -> ConnectionSettings:
    tables = {key: cast(dict[str, Any], value) for key, value in profiles.items() if isinstance(value, dict)}
    values: dict[str, Any] | None = tables.get(name)
    if values is None:
        there = ", ".join(tables)
        raise ConfigError(f"{file}: has no profile {name!r}; there are: {there or 'none'}")
    for key, value in values.items():
        if key == "api_key":
            raise ConfigError(
                f"{file}: {name}.api_key: a key does not belong here; put it into a file that you alone can read, and "
                "name that: api_key_file"
            )
        if key not in _KINDS:
            raise ConfigError(f"{file}: {name}.{key}: unknown key; there are: {', '.join(_KINDS)}")
        if type(value) is not _KINDS[key]:
            raise ConfigError(f"{file}: {name}.{key}: is {value!r}, must be {_TYPES[_KINDS[key]]}")
    if "ca" in values and values.get("tls") is False:
        raise ConfigError(f"{file}: {name}: tls is false, and there is a `ca`; leave out one of them")
    key_file, ca = (file.parent / Path(values[key]).expanduser() if key in values else None for key in _PATHS)
    return ConnectionSettings(
        f"{file}: {name}.api_key_file",
        values.get("router"),
        None,
        key_file,
        ca,
        values.get("tls"),
        values.get("server_name"),
    )
