"""The table of fields in docs/gateway.md: of OpenAI's requests, and of those that other engines add to them."""

from __future__ import annotations

import json
from typing import get_args

from pydantic.fields import FieldInfo

from docs.hooks.tables import code, table
from outrider.cli.comments import field_comments
from outrider.gateway.schema import Chat, Completion, GenerationForm, NoEffect, Unserved

SERVED, NO_EFFECT, REFUSED = "served", "no effect", "refused"


def reference() -> str:
    """The table, from the bodies."""
    names = sorted({*Chat.model_fields, *Completion.model_fields})
    rows = [(code(name), state(Chat, name), state(Completion, name), remark(name)) for name in names]
    return table(("field", "chat", "completions", "remarks"), rows)


def state(kind: type[GenerationForm], name: str) -> str:
    """What becomes of a field in the body of an endpoint."""
    field = kind.model_fields.get(name)
    if field is None:
        return ""
    for kind_of_field, text in ((NoEffect, NO_EFFECT), (Unserved, REFUSED)):
        if any(validator is own for validator in get_args(kind_of_field)[1:] for own in field.metadata):
            return text
    return SERVED


def remark(name: str) -> str:
    """What the code says of a field, and which values of a refused one are taken."""
    owners = [it for kind in (Chat, Completion) for it in kind.__mro__ if name in vars(it).get("__annotations__", {})]
    said = [field_comments(owner).get(name, "") for owner in dict.fromkeys(owners)]
    values = dict.fromkeys(neutral(kind.model_fields[name]) for kind in (Chat, Completion) if name in kind.model_fields)
    return "; ".join([*(text for text in said if text), *(f"may be {value}" for value in values if value)])


def neutral(field: FieldInfo) -> str:
    """The values that change nothing of an answer."""
    extra = field.json_schema_extra
    values = extra["neutral"] if isinstance(extra, dict) else ()
    return " or ".join(code(json.dumps(value)) for value in values) if isinstance(values, list) else ""
