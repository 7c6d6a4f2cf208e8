"""Command lines of servers as the servers would take them, without running any."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import typer

from outrider.cli import flags
from outrider.cli.main import app
from outrider.client import _connection
from outrider.config import DrafterConfig, GatewayConfig, RouterConfig, Section, VerifierConfig

KINDS: dict[str, type[Section]] = {
    "router": RouterConfig,
    "verifier": VerifierConfig,
    "drafter": DrafterConfig,
    "gateway": GatewayConfig,
}


class Command(NamedTuple):
    role: str
    section: Section
    redis: str | None  # the gateway has none


def parsed(arguments: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """What a server's command makes of them. Raises what typer does, or SystemExit after the server's own message."""
    role, *rest = arguments
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        context = _commands()[role].make_context(role, rest)
    return Command(role, flags.section(context), context.params.get("redis"))


def read_from_environment(role: str) -> set[str]:
    """The variables that a role's own code reads: its flags', and the gateway's as a client of the router."""
    command = _commands()[role]
    named = [parameter.envvar for parameter in command.get_params(command.context_class(command))]
    variables = {name for given in named if given for name in ([given] if isinstance(given, str) else given)}
    return variables | (set(_connection.VARIABLES) if role == "gateway" else set())


@cache
def _commands() -> dict[str, typer.core.TyperCommand]:
    return typer.main.get_command(app).commands  # type: ignore[attr-defined,no-any-return]
