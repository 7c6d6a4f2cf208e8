"""Names that operators give, of tenants and adapters."""

from __future__ import annotations

import re

from outrider.errors import InvalidRequest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_name(field: str, name: str) -> None:
    """Raise InvalidRequest unless a name is one."""
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            field,
            f"is {name[:80]!r}, must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or digit",
        )
