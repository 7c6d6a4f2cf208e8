"""The reference of the command line: every command with its arguments and flags, as `--help` has them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from docs.hooks.tables import code, table
from outrider.cli.flags import SectionCommand
from outrider.cli.main import app


def commands() -> Iterator[tuple[str, Any]]:
    """What is behind `outrider`, by name: `keys add`, for one of a group."""
    root: Any = typer.main.get_command(app)
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", entry) for inner, entry in command.commands.items())
        else:
            yield name, command


def flags_of(command: Any) -> list[Any]:
    """A command's arguments and flags."""
    context = command.context_class(command)
    command.get_params(context)  # some are made when they are asked for
    if isinstance(command, SectionCommand):
        command.describe(context)
    return [*command.params]


def reference() -> str:
    """All commands, in Markdown."""
    return "\n\n".join(_command(name, command) for name, command in commands())


def _command(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=f"outrider {name}")
    usage = " ".join([context.info_name, *command.collect_usage_pieces(context)])
    rows = [
        (code(record[0]), record[1].replace("  ", " "))
        for parameter in flags_of(command)
        if (record := parameter.get_help_record(context))
    ]
    parts = [f"## outrider {name}", inspect.cleandoc(command.help or ""), f"```text\n{usage}\n```"]
    return "\n\n".join([*parts, table(("argument or flag", "what it is"), rows)] if rows else parts)
