"""What commands share: flags, and errors as one message and an exit status, never a traceback for a user's mistake."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.errors import InternalError, OutriderError
from outrider.rpc.lifecycle import USER_ERROR_STATUS

if TYPE_CHECKING:
    from rich.table import Table

FAILURE = 1  # exit status of an error that the user cannot correct
INTERRUPTED = 130  # exit status that shells give for SIGINT

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def _without_secrets(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """Return the URL. Raises BadParameter for a password on the command line, where every local user can read it."""
    from urllib.parse import parse_qs, urlsplit

    source = context.get_parameter_source(parameter.name or "")
    parts = urlsplit(value)
    if source is not None and source.name == "COMMANDLINE" and (parts.password or "password" in parse_qs(parts.query)):
        raise typer.BadParameter("a password on the command line is no secret; give the URL as REDIS_URL")
    return value


Redis = Annotated[
    str,
    typer.Option(
        envvar="REDIS_URL",
        show_envvar=True,
        callback=_without_secrets,
        help="redis://HOST:PORT, rediss://HOST:PORT, unix:///PATH, or redis+cluster://HOST:PORT for a Redis Cluster. "
        "A URL with a password is accepted only from the environment.",
    ),
]
Address = Annotated[
    str | None, typer.Option(help="The router's HOST:PORT. [default: OUTRIDER_ROUTER's, or the profile's]")
]
Profile = Annotated[str | None, typer.Option(help="Name of a connection in the profiles file.")]


def parse_count(text: str | int) -> int:
    """Parse a count like 150M. Raises BadParameter, which typer reports with the flag's name."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", str(text).strip().upper())
    if match is None:
        raise typer.BadParameter("must be a number like 150M, 1.5B or 150000000")
    return round(float(match[1]) * _UNITS[match[2]])


def count_in(text: str) -> str | int:
    """Return a number like 20M as one, and other texts as they are."""
    return parse_count(text) if re.fullmatch(r"\d+(\.\d+)?[KMB]", text.strip().upper()) else text


def figures_table(*headings: str, **style: Any) -> Table:
    """Return a table without rows, of one column for each heading. `style`: as for rich's `Table`."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, show_edge=False, **style)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


@contextmanager
def reported() -> Iterator[None]:
    """Print an OutriderError of the block to stderr and turn it into the exit status."""
    try:
        yield
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        raise SystemExit(FAILURE if isinstance(error, InternalError) else USER_ERROR_STATUS) from None
