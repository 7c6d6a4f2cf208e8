"""Schemas as pydantic and others write them: objects are closed where their keys are known, references stay valid."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from outrider.core.answers.schemas import closed, followable, nested


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int
    color: Color


class Shape(BaseModel):
    points: list[Point]
    inner: Shape | None = None


class Loose(BaseModel):
    model_config = ConfigDict(extra="allow")
    x: int


OPEN = {"type": "object", "properties": {"a": {}}}
CLOSED = {**OPEN, "additionalProperties": False}
BASE = {"$defs": {"A": OPEN}, "allOf": [{"$ref": "#/$defs/A"}, {"type": "object", "properties": {"b": {}}}]}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"type": "object"}, {"type": "object"}),
        ({"items": OPEN, "anyOf": [OPEN, True]}, {"items": CLOSED, "anyOf": [CLOSED, True]}),
        ({"allOf": [OPEN]}, {"allOf": [CLOSED]}),
        (BASE, BASE),
        ({**OPEN, "oneOf": [OPEN]}, {**OPEN, "oneOf": [OPEN]}),
        (
            {"properties": {"properties": OPEN}, "additionalProperties": True},
            {"properties": {"properties": CLOSED}, "additionalProperties": True},
        ),
        ({**OPEN, "patternProperties": {"^b": OPEN}}, {**OPEN, "patternProperties": {"^b": CLOSED}}),
        ({"const": OPEN, "enum": [OPEN], "default": OPEN}, {"const": OPEN, "enum": [OPEN], "default": OPEN}),
        (True, True),
        ([OPEN], [OPEN]),
    ],
)
def test_objects_are_closed_where_one_place_knows_their_keys(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


def test_models_of_pydantic_are_closed_unless_they_allow_other_keys() -> None:
    schema = closed(Shape.model_json_schema())
    assert schema["$defs"]["Point"]["additionalProperties"] is False
    assert schema["$defs"]["Shape"]["additionalProperties"] is False
    assert closed(Loose.model_json_schema())["additionalProperties"] is True


def test_references_of_a_nested_schema_begin_with_its_place() -> None:
    schema = {
        "$ref": "#",
        "properties": {"$ref": {"$ref": "#/$defs/A"}, "b": {"$ref": "https://x#/a"}},
        "const": {"$ref": "#"},
    }
    assert nested(schema, "/properties/arguments") == {
        "$ref": "#/properties/arguments",
        "properties": {"$ref": {"$ref": "#/properties/arguments/$defs/A"}, "b": {"$ref": "https://x#/a"}},
        "const": {"$ref": "#"},
    }


def test_what_answers_are_not_held_to_is_left_out_and_named() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a/b": {"type": "array", "uniqueItems": True, "items": {"type": "string", "format": "phone"}},
            "uniqueItems": {"type": "string", "format": "uuid"},
            "n": {"type": "integer", "format": "int32", "uniqueItems": False},
        },
        "dependentRequired": {"n": ["a/b"]},
        "default": {"uniqueItems": True},
    }
    made = followable(schema)
    assert made.ignored == ["#/dependentRequired", "#/properties/a~1b/uniqueItems", "#/properties/a~1b/items/format"]
    assert made.schema == {
        "type": "object",
        "properties": {
            "a/b": {"type": "array", "items": {"type": "string"}},
            "uniqueItems": {"type": "string", "format": "uuid"},
            "n": {"type": "integer", "format": "int32"},
        },
        "default": {"uniqueItems": True},
    }


@pytest.mark.parametrize("key", ["not", "if", "$dynamicRef"])
def test_what_must_not_be_left_out_is_refused_with_its_place(key: str) -> None:
    with pytest.raises(ValueError, match=rf"#/properties/a/anyOf/1/{re.escape(key)} cannot be followed"):
        followable({"properties": {"a": {"anyOf": [{}, {key: {}}]}, key: {}}})
