"""JSON schemas as answers follow them: what a schema leaves open, and where it lies within another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # objects of schemas
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
ALONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
JOINED = ("allOf", "anyOf", "oneOf", "$ref")  # beside `properties`: other schemas that hold for the same object
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")  # are enforced
# What an answer may break: it is checked over whole values, and a grammar follows them from left to right.
IGNORED = (
    *("uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "dependentRequired"),
    *("dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "then", "else"),
)
REFUSED = ("not", "if", "$dynamicRef", "$recursiveRef")  # an answer that breaks one of these is another one altogether
WHITESPACE = r"\n?[ \t]{0,16}"  # between the parts of JSON: without a bound a model may write nothing else for ever


class Followable(NamedTuple):
    """A schema that a grammar can follow, and what it lacks of the one that was asked for."""

    schema: Any
    ignored: list[str]  # JSON pointers


def followable(schema: Any, place: str = "#") -> Followable:
    """Return a schema without what grammars do not enforce. A `format` that they do not know is an annotation.

    `place`: a JSON pointer. Raises ValueError, with the place, for what must not be left out.
    """
    if not isinstance(schema, dict):
        return Followable(schema, [])
    for key in REFUSED:
        if key in schema:
            raise ValueError(f"{place}/{key} cannot be followed by an answer; say what is allowed instead")
    ignored = [f"{place}/{key}" for key in IGNORED if schema.get(key) not in (None, False)]
    kept = {key: value for key, value in schema.items() if key not in IGNORED}
    if kept.get("type", "string") == "string" and kept.get("format", FORMATS[0]) not in FORMATS:
        ignored.append(f"{place}/format")
        del kept["format"]

    def follow(part: Any, at: str) -> Any:
        made = followable(part, f"{place}/{at}")
        ignored.extend(made.ignored)
        return made.schema

    return Followable(_mapped(kept, follow), ignored)


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no keys beside their `properties`, unless the schema says something of others.

    By JSON Schema they may have any, and a weak model adds keys until its answer is cut. A schema that describes one
    object in several places, as by `allOf`, is returned as it is: each place alone does not know all of its keys.
    """
    return schema if _joins(schema) else _closed(schema)


def nested(schema: Any, pointer: str) -> Any:
    """Return a schema for its place within another one: references to itself begin with the place, a JSON pointer."""
    if not isinstance(schema, dict):
        return schema
    made = _mapped(schema, lambda part, at: nested(part, pointer))
    reference = made.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        made["$ref"] = f"#{pointer}{reference[1:]}"
    return made


def _joins(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    several = schema.get("allOf")
    if (isinstance(several, list) and len(several) > 1) or (
        "properties" in schema and not schema.keys().isdisjoint(JOINED)
    ):
        return True
    found: list[bool] = []
    _mapped(schema, lambda part, at: found.append(_joins(part)))
    return any(found)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = _mapped(schema, lambda part, at: _closed(part))
    if "properties" in made and "patternProperties" not in made:
        made.setdefault("additionalProperties", False)
    return made


def _mapped(schema: dict[str, Any], change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Return a schema with each schema right within it changed; `change` gets it and its place in this one. What a
    schema has as values is left alone."""
    made = dict(schema)
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            made[key] = {name: change(part, f"{key}/{_escaped(name)}") for name, part in value.items()}
        elif key in LISTS and isinstance(value, list):
            made[key] = [change(part, f"{key}/{number}") for number, part in enumerate(value)]
        elif key in ALONE and isinstance(value, dict):
            made[key] = change(value, key)
    return made


def _escaped(name: str) -> str:
    """Return a name as JSON pointers have it (RFC 6901, section 3)."""
    return name.replace("~", "~0").replace("/", "~1")
