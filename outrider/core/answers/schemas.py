"""JSON schemas as answers follow them: what a schema leaves open, and where it lies within another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # objects of schemas
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
ALONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
JOINED = ("allOf", "anyOf", "oneOf", "$ref")  # beside `properties`: other schemas that hold for the same object


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
    made = _mapped(schema, lambda part: nested(part, pointer))
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
    _mapped(schema, lambda part: found.append(_joins(part)))
    return any(found)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = _mapped(schema, _closed)
    if "properties" in made and "patternProperties" not in made:
        made.setdefault("additionalProperties", False)
    return made


def _mapped(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with each schema right within it changed. What a schema has as values is left alone."""
    made = dict(schema)
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            made[key] = {name: change(part) for name, part in value.items()}
        elif key in LISTS and isinstance(value, list):
            made[key] = [change(part) for part in value]
        elif key in ALONE and isinstance(value, dict):
            made[key] = change(value)
    return made
