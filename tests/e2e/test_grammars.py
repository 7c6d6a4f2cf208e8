"""Answers of a cluster follow their grammars, with and without drafters alike, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

import outrider
from outrider.client._terms import grammar_of
from outrider.config import ClusterConfig, DrafterConfig, RouterConfig, VerifierConfig
from outrider.core.answers.schemas import closed
from outrider.core.session.contract import Grammar
from outrider.errors import InvalidRequest
from outrider.fleet.cluster import LocalCluster
from tests.e2e.conftest import MODELS

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEMA = {
    "type": "object",
    "properties": {
        "function": {"type": "string", "maxLength": 12},
        "arguments": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 3},
        "returns": {"enum": ["nothing", "a number", "a list of all of them"]},
    },
    "required": ["function", "arguments", "returns"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def client() -> AsyncIterator[outrider.AsyncClient]:
    """Two kinds of drafters: a small model, and the target's own checkpoint."""
    target = MODELS / "target"
    config = ClusterConfig(
        router=RouterConfig(listen="127.0.0.1:0", models={"target": target}, overlap=True),
        verifier=[VerifierConfig(model=target, dtype="float32")],
        drafter=[DrafterConfig(model=MODELS / "drafter", dtype="float32")],
    )
    async with (
        LocalCluster(config, forward=lambda name, line: print(name, line)) as cluster,
        outrider.AsyncClient(cluster.router_address) as connected,
    ):
        yield connected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_json_of_a_schema_is_equal_with_and_without_drafters(
    client: outrider.AsyncClient, prompts: list[str], temperature: float
) -> None:
    accepted = ended = 0
    for seed, prompt in enumerate(prompts[:4]):
        terms: dict[str, Any] = {"schema": SCHEMA, "temperature": temperature, "seed": seed, "max_tokens": 200}
        plain = await client.generate(prompt, speculation="off", **terms)
        ours = await client.generate(prompt, **terms)
        assert (ours.token_ids, ours.text, ours.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
        accepted += ours.usage.accepted
        if ours.finish_reason == "stop":
            ended += 1
            call = json.loads(ours.text)
            assert call.keys() == {"function", "arguments", "returns"}
            assert call["returns"] in ("nothing", "a number", "a list of all of them")
            assert all(0 <= it <= 999 for it in call["arguments"])
            assert ours.parsed == call
        else:
            with pytest.raises(ValueError, match="raise max_tokens"):
                _ = ours.parsed
    assert accepted
    assert ended


class Answer(BaseModel):
    verdict: Literal["yes", "no"]
    parts: Annotated[list[Literal[1, 2, 3]], Field(max_length=2)]


class Anything(BaseModel, extra="allow"):
    parts: dict[str, Answer]


async def test_only_a_model_that_allows_other_keys_has_them() -> None:
    made = grammar_of({"schema": Anything})
    assert made is not None
    schema = closed(json.loads(made.text))
    assert schema["additionalProperties"] is True
    assert schema["properties"]["parts"]["additionalProperties"] == {"$ref": "#/$defs/Answer"}
    assert schema["$defs"]["Answer"]["additionalProperties"] is False
    given = {"type": "object", "properties": {}}
    assert grammar_of({"schema": given}) == Grammar("json_schema", json.dumps(given))  # a mapping as it is


async def test_a_pydantic_model_is_a_schema_and_its_object_is_returned(
    client: outrider.AsyncClient, prompts: list[str]
) -> None:
    answer = await client.generate(prompts[0], schema=Answer, seed=1, max_tokens=200)
    assert isinstance(answer.parsed, Answer)
    assert answer.parsed == Answer.model_validate_json(answer.text)
    assert json.loads(answer.text) == answer.parsed.model_dump()  # and no other keys
    with pytest.raises(ValueError, match="give schema="):
        _ = (await client.generate(prompts[0], max_tokens=1)).parsed


async def test_regexes_choices_and_grammars_are_followed_by_concurrent_sessions(
    client: outrider.AsyncClient, prompts: list[str]
) -> None:
    kinds: list[tuple[dict[str, Any], str]] = [
        ({"regex": "(red|green)-[0-9]{3}"}, r"(red|green)-[0-9]{3}"),
        ({"choices": ["yes", "no", "not at all"]}, "yes|no|not at all"),
        ({"grammar": 'start: "<" WORD ">"\nWORD: /[a-z]{1,5}/'}, "<[a-z]{1,5}>"),
        ({"regex": "[ab]{4}", "logprobs": 2, "min_tokens": 30}, "[ab]{4}"),
        ({"regex": "x+", "stop": "xxx", "presence_penalty": 1.0}, "x*"),
    ]
    asked = [(kinds[index % len(kinds)], index) for index in range(15)]
    answers = await asyncio.gather(
        *(client.generate(prompts[seed % 3], seed=seed, max_tokens=40, **terms) for (terms, _), seed in asked)
    )
    for ((terms, pattern), seed), answer in zip(asked, answers, strict=True):
        assert re.fullmatch(pattern, answer.text), answer.text
        assert answer.finish_reason == "stop" or "stop" in terms
        again = await client.generate(prompts[seed % 3], seed=seed, max_tokens=40, speculation="off", **terms)
        assert again.token_ids == answer.token_ids
        assert len(answer.logprobs) == (len(answer.token_ids) if "logprobs" in terms else 0)


async def test_rules_that_compare_distributions_stay_within_the_grammar(
    client: outrider.AsyncClient, prompts: list[str]
) -> None:
    for rule in ("speculative-sampling", "traversal-verification", "target-match"):
        answer = await client.generate(prompts[0], regex="(north|south), [0-9]{2} miles", rule=rule, max_tokens=60)
        assert re.fullmatch("(north|south), [0-9]{2} miles", answer.text)


async def test_a_turn_of_a_session_has_a_grammar_of_its_own(client: outrider.AsyncClient, prompts: list[str]) -> None:
    first = await client.generate(prompts[0], choices=["left", "right"], seed=1)
    second = await client.generate(" and then", choices=["up", "down"], seed=1, session=first.session_id)
    third = await client.generate(" and then", max_tokens=5, seed=1, session=first.session_id)
    assert first.text in ("left", "right")
    assert second.text in ("up", "down")
    assert third.usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("terms", "problem"),
    [
        ({"regex": "("}, "cannot be followed"),
        ({"schema": {"$ref": "#/nope"}}, "does not exist"),
        ({"schema": 3}, "must be a JSON schema or a pydantic model"),
        ({"choices": []}, "at least one"),
        ({"regex": "a", "choices": ["a"]}, "does not go with"),
        ({"regex": "a", "ignore_eos": True}, "does not go with a grammar"),
        ({"grammar": "x" * 200_000}, "must have at most"),
    ],
    ids=str,
)
async def test_an_impossible_grammar_is_refused_by_name(
    client: outrider.AsyncClient, terms: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        await client.generate("x", **terms)
