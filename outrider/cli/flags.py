"""Flags of a configuration: each key of a section is a flag, and the comment behind the key is its help."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from outrider.cli.command import count_in, reported

if TYPE_CHECKING:
    from outrider.config import Section

TLS = {"ca": "OUTRIDER_CA", "cert": "OUTRIDER_CERT", "key": "OUTRIDER_KEY"}
RAY = ("cpus", "gpus", "resources")  # keys of who starts a router or a gateway
OBSERVED = {"metrics": "OUTRIDER_METRICS", "log_format": "OUTRIDER_LOG_FORMAT"}
_GIVEN = "outrider.flags"
_VALUES = {"integer": "int", "number": "float", "string": "str"}


class SectionCommand(TyperCommand):
    """A command that has the flags of a section. The section's module is imported when the command is used."""

    section: str  # MODULE:CLASS
    without: frozenset[str]  # keys without a flag
    variables: dict[str, str]  # environment variables of flags, by key
    complete: bool  # whether flags must have all that the section needs; else a file may have it

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the flags, those of the section among them."""
        if not hasattr(self, "keys"):
            kind = section_of(self.section)
            schema = kind.model_json_schema()
            needed = {*schema.get("required", ())} if self.complete else set[str]()
            properties = schema["properties"]
            shown = sorted(properties.keys() - self.without, key=[*properties].index)
            shown.sort(key=lambda key: (key not in needed, kind.__mro__.index(_owner(kind, key))))  # its own come first
            self.keys = {key: properties[key] for key in shown}
            options = {
                key: _option(key, value, required=key in needed, variable=self.variables.get(key))
                for key, value in self.keys.items()
            }
            self.params += _parameters(options, needed)
        return super().get_params(ctx)

    def describe(self, ctx: Any) -> None:
        """Give the flags their help, which reads the section's source: a server that starts has no need of it."""
        kind = section_of(self.section)
        for parameter in self.get_params(ctx):
            if (schema := self.keys.get(parameter.name)) is not None:
                parameter.help = _help(description(kind, parameter.name), schema)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        self.describe(ctx)
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the flags. What the section's are given is for `given`, and no argument of the command's function."""
        rest = super().parse_args(ctx, args)
        values = {key: ctx.params.pop(key, None) for key in self.keys}
        ctx.meta[_GIVEN] = {
            key: _value(key, value, self.keys[key]) for key, value in values.items() if value not in (None, (), [])
        }
        return rest


def configured(
    section: str, *without: str, variables: dict[str, str] | None = None, complete: bool = True
) -> type[SectionCommand]:
    """Return the class of a command with the flags of a section, MODULE:CLASS, `without` some of its keys."""
    attributes = {
        "section": section,
        "without": frozenset(without),
        "variables": variables or {},
        "complete": complete,
    }
    return type("SectionCommand", (SectionCommand,), attributes)


def section_of(name: str) -> type[Section]:
    """Return the class that MODULE:CLASS names."""
    module, _, kind = name.partition(":")
    found: type[Section] = getattr(import_module(module), kind)
    return found


def given(context: typer.Context) -> dict[str, Any]:
    """Return the values of the section's flags that were given, not checked yet."""
    return dict(context.meta[_GIVEN])


def section(context: typer.Context) -> Any:
    """Return the section that a command's flags make; flags that are not given keep their defaults."""
    from outrider.config import parse

    assert isinstance(context.command, SectionCommand)
    with reported():
        return parse(section_of(context.command.section), given(context), "flags")


def flag_name(key: str, *, mapping: bool) -> str:
    """Return a key's flag: --tool-format for tool_formats, whose flag is given for each entry."""
    return "--" + (key.removesuffix("s") if mapping else key).replace("_", "-")


def description(section: type[Section], key: str) -> str:
    """Return the comment behind a key, or on the lines above it, in the class that declares it."""
    from outrider.cli.comments import field_comments

    return re.sub(r"\bNone: ", "left out: ", field_comments(_owner(section, key))[key])


def _owner(section: type[Section], key: str) -> type:
    return next(base for base in section.__mro__ if key in vars(base).get("__annotations__", {}))


def _parameters(options: dict[str, Any], needed: set[str]) -> list[Any]:
    """Return what typer makes of a function with these annotations. `needed`: those without a default."""

    def function(**_: Any) -> None: ...

    parameters = [
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if key in needed else None,
            annotation=option,
        )
        for key, option in options.items()
    ]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = options
    made = typer.Typer(add_completion=False)
    made.command()(function)
    return [*typer.main.get_command(made).params]


def _option(key: str, schema: dict[str, Any], *, required: bool, variable: str | None) -> Any:
    value = _given_form(schema)
    kind = value.get("type", "string")
    name, many = flag_name(key, mapping=kind == "object"), kind in ("array", "object")
    option = typer.Option(
        f"{name}/--no-{name[2:]}" if kind == "boolean" else name,
        metavar=_form(value),
        envvar=variable,
        show_default=False,
    )
    value_type: Any = list[str] if many else bool if kind == "boolean" else str
    return Annotated[value_type if required else value_type | None, option]


def _given_form(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value that is given, for a key that may be left out."""
    found: dict[str, Any] = next(entry for entry in schema.get("anyOf", [schema]) if entry.get("type") != "null")
    return found


def _form(schema: dict[str, Any]) -> str | None:
    """Return what a flag's value looks like."""
    value = schema.get("items", schema)
    kind: str = value.get("type", "string")
    its_format: str | None = value.get("format")
    if kind == "object":
        entry = value["additionalProperties"]
        return {"path": "NAME=FOLDER", "number": "NAME=AMOUNT"}.get(entry.get("format") or entry["type"], "NAME=VALUE")
    if kind == "boolean" or its_format == "HOST:PORT":
        return its_format
    return f"<{'|'.join(value.get('enum', ())) or its_format or _VALUES[kind]}>"


def _help(comment: str, schema: dict[str, Any]) -> str:
    text, _, left_out = comment.partition("; left out: ")
    default, many = schema.get("default"), _given_form(schema).get("type") in ("array", "object")
    if many:
        text += "; may be repeated"
    shown = left_out or ("" if default in (None, False, "", [], {}) else str(default))
    start = text if re.match(r"[\w-]+: ", text) else text[:1].upper() + text[1:]  # not the name of a value
    return start + "." + (f" [default: {shown}]" if shown and not many else "")


def _value(key: str, value: Any, schema: dict[str, Any]) -> Any:
    """Return a flag's value as a file would have it."""
    kinds = {entry.get("type") for entry in schema.get("anyOf", [schema])}
    if "object" in kinds:
        values = dict(entry.partition("=")[::2] for entry in value)
        if not all(name and text for name, text in values.items()):
            raise typer.BadParameter(f"must be {_form(schema)}", param_hint=flag_name(key, mapping=True))
        return values
    if "array" in kinds and schema["items"].get("type") == "integer":
        return [number.strip() for entry in value for number in entry.split(",")]
    return count_in(value) if "integer" in kinds and "string" not in kinds else value  # bytes have units of their own
