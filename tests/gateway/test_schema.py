"""A malformed body is refused at its first malformed part, however many parts it has."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from outrider.gateway.apis.messages import MessagesBody
from outrider.gateway.apis.responses import ResponsesBody
from outrider.gateway.schema import AnswerRequest, Chat, Completion

MANY = 60_000
COMPLETION = {"model": "m", "prompt": "x"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("form", "body", "where"),
    [
        (Completion, {"prompt": [None] * MANY}, "prompt"),
        (Completion, {"prompt": [["x"] * MANY]}, "prompt"),
        (Completion, {"prompt": [["x"]] * MANY}, "prompt"),
        (Completion, {f"field{number}": 1 for number in range(MANY)}, "field0"),
        (Completion, {"outrider": {f"field{number}": 1 for number in range(MANY)}}, "outrider"),
        (Completion, {"logit_bias": {f"x{number}": 1 for number in range(MANY)}}, "logit_bias"),
        (Completion, {"stop": [1] * MANY}, "stop"),
        (Completion, {"outrider": {"stop_ids": ["x"] * MANY}}, "outrider"),
        (Chat, {"messages": [{}] * MANY}, "messages"),
        (Chat, {"messages": [user([{}] * MANY)]}, "messages"),
        (Chat, {"messages": [user("x")], "modalities": ["audio"] * MANY}, "modalities"),
        (MessagesBody, {"max_tokens": 1, "messages": [{}] * MANY}, "messages"),
        (MessagesBody, {"max_tokens": 1, "messages": [user([{}] * MANY)]}, "messages"),
        (MessagesBody, {"max_tokens": 1, "messages": [user("x")], "system": [{}] * MANY}, "system"),
        (MessagesBody, {"max_tokens": 1, "messages": [user("x")], "tools": [{}] * 100}, "tools"),
        (ResponsesBody, {"input": [{}] * 4000}, "input"),
        (ResponsesBody, {"input": [user([{}] * MANY)]}, "input"),
        (ResponsesBody, {"input": "x", "include": [1] * MANY}, "include"),
        (ResponsesBody, {"input": "x", "metadata": {f"field{number}": 1 for number in range(MANY)}}, "metadata"),
    ],
)
def test_many_malformed_parts_give_few_errors(form: type[AnswerRequest], body: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError) as refused:
        form.model_validate((COMPLETION if form is Completion else {"model": "m"}) | body)
    errors = refused.value.errors()
    assert errors[0]["loc"][0] == where
    assert len(errors) <= 4  # the kinds of prompts


@pytest.mark.parametrize(("prompts", "n"), [(129, 1), (65, 2), (2, 65)])
def test_the_total_number_of_answers_is_bounded(prompts: int, n: int) -> None:
    with pytest.raises(ValidationError, match=f"prompt: is for {prompts * n} answers, must be at most 128"):
        Completion.model_validate(COMPLETION | {"prompt": ["x"] * prompts, "n": n})
    assert len(Completion.model_validate(COMPLETION | {"prompt": ["x"] * 64, "n": 2}).prompts) == 64


def test_the_number_of_messages_is_bounded() -> None:
    assert len(Chat.model_validate({"model": "m", "messages": [user("x")] * 4096}).messages) == 4096
    with pytest.raises(ValidationError, match="at most 4096 items"):
        Chat.model_validate({"model": "m", "messages": [user("x")] * 4097})
