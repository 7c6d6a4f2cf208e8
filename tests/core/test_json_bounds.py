"""JSON of callers is counted before it is parsed, and every count is what a parser would find."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.json_bounds import MOST, JsonBounds, JsonCounts, check_json
from outrider.errors import InvalidRequest

MIB = 2**20
UNITS = ("[", "{", '{"a":', "]", '"', '"",', "\\", '\\"', '\\\\"', "[],", "1,", "x", ',"":[', "\ud800")
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text('\\"[]{},: x\n€'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('\\"[]{},:x'), inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> JsonCounts:
    """What a parser finds; of values one less for each list or object that has some, since commas are counted."""
    if isinstance(value, str):
        return JsonCounts(strings=1)
    if not isinstance(value, list | dict):
        return JsonCounts()
    inner = [counted(item) for item in (value.values() if isinstance(value, dict) else value)]
    return JsonCounts(
        1 + max((each.depth for each in inner), default=0),
        1 + sum(each.containers for each in inner),
        sum(each.strings for each in inner) + (len(value) if isinstance(value, dict) else 0),
        1 + sum(each.values for each in inner) + max(0, len(value) - 1),
    )


@given(documents, st.booleans())
def test_counts_equal_those_of_a_parser(document: Any, ascii_only: bool) -> None:
    bounds = JsonBounds()
    bounds.check("x", json.dumps(document, ensure_ascii=ascii_only))
    assert bounds.counted == counted(document)


@pytest.mark.parametrize(
    ("body", "member", "what"),
    [
        ('{"a": "[[", "tools": [1], "deep": ' + "[" * 65, "deep", "64 levels"),
        ('{"tools": [' + "{}," * 2**14, "tools", "lists and objects"),
        ('{"model": "x", "stop": [' + '"",' * 2**16, "stop", "strings"),
        ('{"model": {"x": []}, "prompt": [' + "1," * 2**19, "prompt", "values"),
        ("[" * 65, "body", "64 levels"),
    ],
)
def test_the_error_names_the_member_of_the_body(body: str, member: str, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what) as raised:
        check_json("", body)
    assert raised.value.field == member


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("depth", "[" * MOST.depth + "]" * MOST.depth),
        ("containers", "[" + "[]," * (MOST.containers - 2) + "[]]"),
        ("strings", "[" + '"",' * (MOST.strings - 1) + '""]'),
        ("values", "[" + "1," * (MOST.values - 1) + "1]"),
    ],
)
def test_each_json_bound_admits_its_maximum_and_nothing_above(kind: str, text: str) -> None:
    bounds = JsonBounds()
    bounds.check("x", text)
    assert getattr(bounds.counted, kind) == getattr(MOST, kind)
    with pytest.raises(InvalidRequest):
        check_json("x", f'["", 1, {text}]')


def test_fields_of_a_request_count_together() -> None:
    bounds = JsonBounds()
    half = "[" + "[]," * (MOST.containers // 2) + "[]]"
    bounds.check("tools", half)
    with pytest.raises(InvalidRequest, match=r"^messages: has more than 16384 lists and objects$"):
        bounds.check("messages", half)


@pytest.mark.parametrize("unit", UNITS)
def test_four_mebibytes_of_any_json_are_counted_in_a_moment(unit: str) -> None:
    for head in ("", '{"a": "', '{"a": ['):
        text = head + unit * (4 * MIB // len(unit))
        began = time.process_time()
        with suppress(InvalidRequest):
            check_json("", text)
        assert time.process_time() - began < 0.3, "it takes some 20 ms on a machine that does nothing else"


def test_a_backslash_before_a_quote_is_read_as_a_parser_does() -> None:
    check_json("x", json.dumps({"a": '\\"' + "[" * 100}))
    with pytest.raises(InvalidRequest):
        check_json("x", '{"a": "\\\\", "b": ' + "[" * 100)
