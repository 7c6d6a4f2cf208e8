"""Flags of commands that call a router. The SDK looks up what the user leaves out."""

from __future__ import annotations

from typing import Annotated

import typer

Address = Annotated[
    str | None, typer.Option(help="The router's HOST:PORT. [default: OUTRIDER_ROUTER's, or the profile's]")
]
Profile = Annotated[str | None, typer.Option(help="Name of a connection in the profiles file.")]
