"""`outrider certs`: creates a development CA and a certificate for each role."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.command import reported


def certs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write them.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Another name or address that clients reach router and gateway by; may be repeated."),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A drafter that gets a certificate of its own; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Days until the certificates expire; the CA lasts ten years.")] = 30,
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace the certificates by new ones of the same CA, for the same names.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files, the CA included.")] = False,
) -> None:
    """Create a CA and certificates for router, verifiers, drafters, gateway and tools, for development.

    Keep ca.key on a machine without servers: whoever has it can impersonate any server. Servers use renewed files for
    new connections, without a restart.
    """
    from outrider.errors import ConfigError
    from outrider.rpc import certificates

    with reported():
        if renew and force:
            raise ConfigError("--renew keeps the CA and --force replaces it; choose one")
        if renew:
            files = certificates.renew(folder, host or (), days=days)
        else:
            files = certificates.make(folder, host or (), drafter or (), days=days, force=force)
    print(f"outrider certs: wrote {', '.join(file.name for file in files)} to {folder}")
