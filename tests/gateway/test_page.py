"""docs/gateway.md: its table has every field of OpenAI's requests, and is what the gateway does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from pydantic import ValidationError

from outrider.core.session.contract import PolicyName
from outrider.gateway.schema import UNSUPPORTED, Chat, Completion, GenerationForm

PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")
MINIMAL: dict[type[GenerationForm], dict[str, Any]] = {
    Chat: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    Completion: {"model": "m", "prompt": "x"},
}


def column(number: int) -> dict[str, str]:
    """The entry of each field in the table of fields, for one endpoint; blank where it does not have the field."""
    rows = PAGE.partition("| field | chat |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0].strip("`"): row[number] for row in cells}


ENDPOINTS = [(Chat, chats.CompletionCreateParamsBase, 1), (Completion, completions.CompletionCreateParamsBase, 2)]


@pytest.mark.parametrize(("kind", "theirs", "number"), ENDPOINTS)
def test_every_openai_field_is_in_the_table(kind: type[GenerationForm], theirs: Any, number: int) -> None:
    known = {name for name, entry in column(number).items() if entry}
    assert {*theirs.__annotations__, "stream"} <= known
    assert known == {*kind.model_fields}


@pytest.mark.parametrize(("kind", "theirs", "number"), ENDPOINTS)
def test_fields_behave_as_the_table_states(kind: type[GenerationForm], theirs: Any, number: int) -> None:
    plain = kind.model_validate(MINIMAL[kind])
    for name, entry in column(number).items():
        assert entry in ("", "served", "no effect", "refused")
        assert kind.model_validate(
            {**MINIMAL[kind], name: None} if entry and name not in MINIMAL[kind] else MINIMAL[kind]
        )
        if entry == "no effect":
            taken = kind.model_validate({**MINIMAL[kind], name: {"any": "thing"}})
            assert taken.options() == plain.options()
            assert getattr(taken, name) is None  # its value takes no memory
        elif entry == "refused":
            with pytest.raises(ValidationError) as refused:
                kind.model_validate({**MINIMAL[kind], name: "x"})
            (error,) = refused.value.errors()
            assert (error["type"], error["loc"]) == (UNSUPPORTED, (name,))
    for policy in get_args(PolicyName):
        assert kind.model_validate({**MINIMAL[kind], "outrider": {"speculation": policy}})


def test_every_outrider_field_is_on_the_page() -> None:
    rows = PAGE.partition("| field of `outrider` |")[2].partition("\n\n")[0]
    for name in type(Chat.model_validate(MINIMAL[Chat]).outrider).model_fields:
        assert f"`{name}`" in rows
