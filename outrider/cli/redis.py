"""The flag that names a command's Redis."""

from __future__ import annotations

from typing import Annotated

import typer


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
