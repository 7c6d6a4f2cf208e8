"""Schemas as pydantic and others write them: objects are closed where their keys are known, references stay valid."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from outrider.core.answers.schemas import closed, nested


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
