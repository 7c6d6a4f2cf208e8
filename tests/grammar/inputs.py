"""Random grammars: schemas, regular expressions, Lark and lists of tools, with what judges the texts that follow them.

Most can be compiled; some nest, repeat, refer to themselves or intersect without bounds.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError

from outrider.core.answers.formats import FORMATS, calls_grammar, read_tools
from outrider.core.json_bounds import JsonBounds
from outrider.core.session.contract import Grammar
from outrider.errors import InvalidRequest

LETTERS = 'abcxyz019 _-.,:"{}[]\\/\n\u00e4\u20ac\U0001f600'
DEPTH = 3


class FuzzedGrammar(NamedTuple):
    """A grammar, and whether a whole text keeps to it."""

    grammar: Grammar
    holds: Callable[[str], bool]


def fuzzed(seed: int) -> FuzzedGrammar:
    """Return the grammar of a seed."""
    rng = random.Random(seed)
    kind = rng.choice((_schema, _schema, _regex, _regex, _lark, _choices, _tools, _garbage))
    return kind(rng)


def _schema(rng: random.Random) -> FuzzedGrammar:
    schema = _json_schema(rng, DEPTH)
    return FuzzedGrammar(Grammar("json_schema", json.dumps(schema)), lambda text: _valid(schema, text))


def _json_schema(rng: random.Random, depth: int) -> Any:
    choice = rng.randrange(11 if depth else 6)
    if choice == 0:
        return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.choice((3, 50, 5000))}
    if choice == 1:
        low = rng.randrange(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 7, 10**6))}
    if choice == 2:
        return {"type": "integer", "multipleOf": rng.choice((1, 3, 7, 1009, 299_993, 2_999_999))}
    if choice == 3:
        return {"enum": [_value(rng) for _ in range(rng.choice((1, 3, 200)))]}
    if choice == 4:
        return {"type": "string", "pattern": f"^{_expression(rng, 2)}$"}
    if choice == 5:
        return {"const": _value(rng)}
    if choice == 6:
        names = [f"{rng.choice('abc')}{at}" for at in range(rng.choice((1, 3, 40)))]
        return {
            "type": "object",
            "properties": {name: _json_schema(rng, depth - 1) for name in names},
            "required": rng.sample(names, rng.randrange(min(4, len(names)) + 1)),
            "additionalProperties": False,
        }
    if choice == 7:
        least = rng.randrange(3)
        most = least + rng.choice((0, 2, 500))
        return {"type": "array", "items": _json_schema(rng, depth - 1), "minItems": least, "maxItems": most}
    if choice == 8:
        return {"anyOf": [_json_schema(rng, depth - 1) for _ in range(rng.choice((1, 3, 30)))]}
    if choice == 9:
        return {"allOf": [_json_schema(rng, depth - 1) for _ in range(2)]}
    length = rng.choice((1, 5, 1200))
    links = {str(at): {"type": "array", "items": {"$ref": f"#/$defs/{(at + 1) % length}"}} for at in range(length)}
    return {"$defs": links, "$ref": "#/$defs/0"}


def _value(rng: random.Random) -> Any:
    return rng.choice((None, True, rng.randrange(-99, 99), "".join(rng.choices(LETTERS, k=rng.choice((0, 5, 900))))))


def _valid(schema: Any, text: str) -> bool:
    try:
        Draft202012Validator(schema).validate(json.loads(text))
    except SchemaError:
        return True  # what the schema means is not defined
    except (ValidationError, ValueError):
        return False
    return True


def _regex(rng: random.Random) -> FuzzedGrammar:
    expression = _expression(rng, DEPTH)
    return FuzzedGrammar(Grammar("regex", expression), lambda text: _matches(expression, text))


def _expression(rng: random.Random, depth: int) -> str:
    choice = rng.randrange(8 if depth else 3)
    if choice == 0:
        return re.escape("".join(rng.choices("abcxyz019 _-", k=rng.choice((1, 4, 300)))))
    if choice == 1:
        return rng.choice(("[a-z]", "[^a]", "[0-9_]", "[a-c]"))
    if choice == 2:
        return rng.choice(("a", "b", "\u00e4", "[\u20ac-\u20af]"))
    if choice == 3:
        return f"(?:{_expression(rng, depth - 1)}|{_expression(rng, depth - 1)})"
    if choice == 4:
        return f"(?:{_expression(rng, depth - 1)})*"
    if choice == 5:
        low = rng.randrange(4)
        return f"(?:{_expression(rng, depth - 1)}){{{low},{low + rng.choice((0, 3, 100, 3000))}}}"
    if choice == 6:
        return f"(?:{_expression(rng, depth - 1)})?"
    return _expression(rng, depth - 1) + _expression(rng, depth - 1)


def _matches(expression: str, text: str) -> bool:
    return re.fullmatch(expression, text, re.ASCII) is not None


def _lark(rng: random.Random) -> FuzzedGrammar:
    """Rules that refer to terminals, to later rules, and sometimes to themselves."""
    count = rng.choice((1, 3, 6, 2700))
    parts = [_expression(rng, 1) for _ in range(min(count, 6))]
    terminals = [f"T{at}: /{part.replace('/', '[/]')}/" for at, part in enumerate(parts)]
    rules = [f"r{at}: T{at % len(parts)} r{at + 1}{rng.choice(('', '?'))}" for at in range(count)]
    rules.append(f"r{count}: T0{rng.choice(('', ' | r0'))}")
    if rng.random() < 0.3:
        terminals.append(f"T{len(parts)}: /(.*a.{{{rng.randrange(40)}}})/ & ~/(.*b.{{{rng.randrange(40)}}})/")
        rules.append(f"r{count + 1}: T{len(parts)}")
        rules[-2] += f" | r{count + 1}"
    return FuzzedGrammar(Grammar("lark", "\n".join(("start: r0", *rules, *terminals))), lambda text: True)


def _choices(rng: random.Random) -> FuzzedGrammar:
    texts = ["".join(rng.choices(LETTERS, k=rng.choice((1, 6, 3000)))) for _ in range(rng.choice((1, 4, 40)))]
    return FuzzedGrammar(Grammar("choices", json.dumps(texts)), lambda text: text in texts)


def _tools(rng: random.Random) -> FuzzedGrammar:
    schemas = [_json_schema(rng, 2) for _ in range(rng.choice((1, 2, 20)))]
    named = [{"type": "object", "properties": {"x": schema}, "required": ["x"]} for schema in schemas]
    definitions = [
        {"type": "function", "function": {"name": f"f{at}", "parameters": schema}} for at, schema in enumerate(named)
    ]
    form = FORMATS[rng.choice(("hermes", "llama3"))]
    try:
        tools = read_tools(json.dumps(definitions), JsonBounds(), required=True, single=True)
        grammar = calls_grammar(form, tools, lambda text: None)
    except InvalidRequest:
        return _garbage(rng)

    def holds(text: str) -> bool:
        try:
            call = json.loads(text.removeprefix(form.begin).removesuffix(form.end))
            return _valid(named[int(call["name"][1:])], json.dumps(call[form.arguments]))
        except (ValueError, KeyError, IndexError):
            return False

    return FuzzedGrammar(grammar, holds)


def _garbage(rng: random.Random) -> FuzzedGrammar:
    kind = rng.choice(("json_schema", "regex", "choices", "lark"))
    nested = rng.choice(("(", "[", '{"items":', '{"not":', "(a|", "a{9}"))
    text = rng.choice((nested * rng.choice((1, 100, 9000)), "".join(rng.choices(LETTERS + "()|*+?&~", k=200))))
    return FuzzedGrammar(Grammar(kind, text), lambda text: True)
