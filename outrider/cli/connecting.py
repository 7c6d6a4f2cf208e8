"""Flags of commands that call a router: what they leave out, the SDK looks up."""

from __future__ import annotations

from typing import Annotated

import typer

Address = Annotated[
    str | None, typer.Option(help="The router's HOST:PORT. [default: OUTRIDER_ROUTER's, or the profile's]")
]
Profile = Annotated[str | None, typer.Option(help="A connection by its name in the file of profiles.")]
