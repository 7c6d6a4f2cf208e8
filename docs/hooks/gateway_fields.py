"""The tables of fields in docs/gateway.md: of OpenAI's requests, with what other engines add, and of Anthropic's."""

from __future__ import annotations

import json
from typing import get_args

from pydantic.fields import FieldInfo

from docs.hooks.tables import code, table
from outrider.cli.comments import field_comments
from outrider.gateway.apis.messages import MessagesBody
from outrider.gateway.apis.responses import ResponsesBody
from outrider.gateway.schema import AnswerRequest, Chat, Completion, NoEffect, Unserved

SERVED, NO_EFFECT, REFUSED = "served", "no effect", "refused"


def reference() -> str:
    """The tables, from the bodies."""
    of_openai = fields({"chat": Chat, "completions": Completion})
    return f"{of_openai}\n\n{fields({'messages': MessagesBody, 'responses': ResponsesBody})}"


def fields(bodies: dict[str, type[AnswerRequest]]) -> str:
    """A table of the fields of two bodies."""
    kinds = [*bodies.values()]
    names = sorted({name for kind in kinds for name in kind.model_fields})
    rows = [(code(name), *(state(kind, name) for kind in kinds), remark(kinds, name)) for name in names]
    return table(("field", *bodies, "remarks"), rows)


def state(kind: type[AnswerRequest], name: str) -> str:
    """What becomes of a field in the body of an endpoint."""
    field = kind.model_fields.get(name)
    if field is None:
        return ""
    for kind_of_field, text in ((NoEffect, NO_EFFECT), (Unserved, REFUSED)):
        if any(validator is own for validator in get_args(kind_of_field)[1:] for own in field.metadata):
            return text
    return SERVED


def remark(kinds: list[type[AnswerRequest]], name: str) -> str:
    """What the code says of a field, and which values of a refused one are taken."""
    owners = [it for kind in kinds for it in kind.__mro__ if name in vars(it).get("__annotations__", {})]
    said = [field_comments(owner).get(name, "") for owner in dict.fromkeys(owners)]
    said = [*dict.fromkeys(said)]
    values = dict.fromkeys(neutral(kind.model_fields[name]) for kind in kinds if name in kind.model_fields)
    return "; ".join([*(text for text in said if text), *(f"may be {value}" for value in values if value)])


def neutral(field: FieldInfo) -> str:
    """The values that change nothing of an answer."""
    extra = field.json_schema_extra
    values = extra["neutral"] if isinstance(extra, dict) else ()
    return " or ".join(code(json.dumps(value)) for value in values) if isinstance(values, list) else ""
