"""The reference of the configuration: every key of every section, as its class, the comment beside it and the flags
that set it have it."""

from __future__ import annotations

import inspect
import json
from typing import Any

from docs.hooks.commands import commands, flags_of
from docs.hooks.tables import code, table
from outrider import config
from outrider.cli.flags import description
from outrider.config import Section
from outrider.simulation import deployment
from outrider.training import recipe

# Heading, class, and the command whose flags set its fields.
SECTIONS: tuple[tuple[str, type[Section], str], ...] = (
    ("A cluster's file", config.ClusterConfig, ""),
    ("`[redis]`", config.RedisConfig, "router"),
    ("`[tls]`", config.TlsConfig, ""),
    ("`[router]`", config.RouterConfig, "router"),
    ("`[[verifier]]`", config.VerifierConfig, "verifier"),
    ("`[[drafter]]`, `[tier.0]`, `[[tier.1]]` and so on", config.DrafterConfig, "drafter"),
    ("`[gateway]`", config.GatewayConfig, "gateway"),
    ("A drafter's recipe", recipe.DrafterRecipe, "train drafter"),
    ("A recipe of heads", recipe.HeadsRecipe, "train eagle"),
    ("A tokenizer's recipe", recipe.TokenizerRecipe, "train tokenizer"),
    ("A scenario's file", deployment.Scenario, ""),
    ("`[deployment]`", deployment.Deployment, ""),
    ("`[[kind]]`", deployment.DrafterKind, ""),
    ("`[[phase]]`", deployment.TrafficPhase, ""),
)
RENAMED = {"url": "redis"}  # keys whose flag's parameter has another name


def reference() -> str:
    """All sections, in Markdown."""
    return "\n\n".join(_section(*entry) for entry in SECTIONS)


def _section(heading: str, section: type[Section], command: str) -> str:
    schema = section.model_json_schema()
    required = schema.get("required", [])
    flags = _flags(command)
    rows = []
    for key, value in schema["properties"].items():
        default = "needed" if key in required else _default(value)
        names = [code(key), *flags.get(RENAMED.get(key, key), ())]
        rows.append(("<br>".join(names), _kind(value), default, description(section, key)))
    prose = inspect.cleandoc(section.__doc__ or "").replace("\n", " ")
    return f"## {heading}\n\n{prose}\n\n{table(('key, flag, variable', 'value', 'default', 'what it is'), rows)}"


def _flags(command: str) -> dict[str, list[str]]:
    """By parameter: the flags and the environment variable of a command."""
    if not command:
        return {}
    return {
        parameter.name: [*map(code, parameter.opts), *([code(parameter.envvar)] if parameter.envvar else [])]
        for parameter in flags_of(dict(commands())[command])
    }


def _kind(schema: dict[str, Any]) -> str:
    """What a value may be, from its JSON schema."""
    given = next(entry for entry in schema.get("anyOf", [schema]) if entry.get("type") != "null")
    if "enum" in given:
        return ", ".join(map(code, given["enum"]))
    if "pattern" in given:
        return f"text like {code(given['pattern'])}"
    match given.get("type"):
        case "boolean":
            return "`true`, `false`"
        case "integer" | "number" as kind:
            return " ".join(filter(None, ("whole number" if kind == "integer" else "number", _bounds(given))))
        case "array":
            return f"list: {_kind(given['items'])}"
        case "object":
            return f"by name: {_kind(given['additionalProperties'])}"
        case "string":
            return str(given.get("format", "text"))
        case _:
            return "section"


def _bounds(schema: dict[str, Any]) -> str:
    low, above, high = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    if above is not None:
        return f"above {above}"
    if high is not None:
        return f"from {low} to {high}"
    return f"from {low}" if low is not None else ""


def _default(schema: dict[str, Any]) -> str:
    value = schema.get("default")
    if "$ref" in schema:
        return "its defaults"
    if not value and not isinstance(value, bool | int | float):
        return "none"
    if isinstance(value, dict):
        return "<br>".join(code(f"{name} = {entry}") for name, entry in value.items())
    return code(json.dumps(value))
