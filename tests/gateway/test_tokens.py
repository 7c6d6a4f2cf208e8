"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import GatewayHarness
from tests.gateway.scripted import CONTEXT, prompt_of, writing
from tests.router.fakes import CONTEXT as SHORT
from tests.router.rig import ANSWER, MODEL

LONG = "def f(x):\n    return x  # é🙂\n" * 40


async def test_a_prompt_has_the_tokens_of_a_generation_and_tokens_have_its_text(harness: GatewayHarness) -> None:
    ids = MODEL.tokenizer.encode("import é\n").ids
    async with httpx.AsyncClient(base_url=harness.url) as web:
        asked = {"model": "target", "prompt": "import é\n"}
        found = (await web.post("/tokenize", json={**asked, "return_token_strs": True})).json()
        alone = (await web.post("/tokenize", json={"prompt": "import é\n"})).json()  # of the only model
        bare = (await web.post("/tokenize", json={**asked, "add_special_tokens": False})).json()
        await web.post("/v1/completions", json={**asked, "max_tokens": 1})
        text = (await web.post("/detokenize", json={"model": "target", "tokens": ids})).json()
    names = [MODEL.tokenizer.id_to_token(id_) for id_ in ids]
    assert found == {"count": len(ids), "max_model_len": SHORT, "tokens": ids, "token_strs": names}
    assert alone == {**found, "token_strs": None}
    assert bare["tokens"] == MODEL.tokenizer.encode("import é\n", add_special_tokens=False).ids
    assert list(harness.verifier.starts[0].tokens) == ids
    assert text == {"prompt": MODEL.tokenizer.decode(ids, skip_special_tokens=False)}
    assert harness.metrics.requests["/tokenize", "200"] == 3
    assert harness.metrics.requests["/detokenize", "200"] == 1


async def test_messages_have_the_tokens_of_their_chat_and_long_ones_come_back_whole(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": LONG}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    asked: dict[str, Any] = {"model": "target", "messages": messages, "tools": tools}
    asked["chat_template_kwargs"] = {"enable_thinking": True}
    async with writing(redis_url, tmp_path, ANSWER, monkeypatch) as harness:
        async with httpx.AsyncClient(base_url=harness.url) as web:
            found = (await web.post("/tokenize", json=asked)).json()
            await web.post("/v1/chat/completions", json={**asked, "max_tokens": 1})
            back = (await web.post("/detokenize", json={"tokens": found["tokens"]})).json()
            counted = await web.post(
                "/v1/messages/count_tokens",
                json={"model": "target", "messages": messages, "thinking": {"type": "enabled"}},
            )
        assert found["tokens"] == list(harness.verifier.starts[-1].tokens)
        assert back["prompt"] == prompt_of(harness)
    assert found["max_model_len"] == CONTEXT
    assert 400 < counted.json()["input_tokens"] < found["count"]


async def test_messages_end_as_those_of_a_chat_do(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Once"}]
    async with (
        writing(redis_url, tmp_path, ANSWER, monkeypatch) as harness,
        httpx.AsyncClient(base_url=harness.url) as web,
    ):
        prompts = set()
        template = {"chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}"}
        for fields in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}, template):
            asked = {"model": "target", "messages": messages, **fields}
            found = (await web.post("/tokenize", json=asked)).json()
            await web.post("/v1/chat/completions", json={**asked, "max_tokens": 1})
            assert found["tokens"] == list(harness.verifier.starts[-1].tokens), fields
            prompts.add(tuple(found["tokens"]))
        both = {"add_generation_prompt": True, "continue_final_message": True}
        refused = await web.post("/tokenize", json={"messages": messages, **both})
    assert len(prompts) == 4
    assert MODEL.tokenizer.encode("[x][Once]").ids in map(list, prompts)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "continue_final_message"


USER = [{"role": "user", "content": "x"}]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt: give prompt or messages"),
    ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt: give prompt or messages"),
    ("/tokenize", {"prompt": "x", "tools": []}, ""),
    ("/tokenize", {"prompt": "x", "model": "other"}, "model 'other' is not served here"),
    ("/tokenize", {"prompt": "x", "chat_template": "y"}, "chat_template: is for messages"),
    ("/tokenize", {"messages": USER, "chat_template": "{% if %}"}, "chat_template: cannot be rendered: Expected"),
    ("/tokenize", {"messages": USER, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs: must not have 'to"),
    ("/tokenize", {"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt: is for messages"),
    ("/tokenize", {"prompt": "x", "continue_final_message": True}, "continue_final_message: is for messages"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}, "has no chat template"),
    ("/tokenize", {"prompt": "x " * 5000}, "prompt: has over"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [1] * (SHORT + 1)}, f"tokens: are {SHORT + 1}, must be at most {SHORT}"),
    ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens: token ids must be"),
]


async def test_what_cannot_be_tokenized_is_refused_by_name(harness: GatewayHarness) -> None:
    async with httpx.AsyncClient(base_url=harness.url) as web:
        for path, asked, fragment in REFUSED:
            answer = await web.post(path, json=asked)
            if not fragment:
                assert answer.status_code == 200
                continue
            assert answer.status_code in (400, 404), asked
            assert fragment in answer.json()["error"]["message"]
