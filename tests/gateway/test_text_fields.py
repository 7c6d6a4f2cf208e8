"""Fields that say what of an answer is text, and what of a prompt is kept: as vLLM has them."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import transformers
from tokenizers import Tokenizer, processors

from outrider.client import AsyncClient
from outrider.core.session.digest import tokenizer_digest
from outrider.errors import InvalidRequest
from tests.gateway.conftest import GatewayHarness, gateway_harness
from tests.router.fakes import CONTEXT, FakeVerifier
from tests.router.rig import FOLDER, MODEL

NAMES = ("<|begin|>", "<|special|>", "<|end|>")
PROMPT = "def f(x):\n    return x + 1\n"


@pytest_asyncio.fixture
async def special(redis_url: str, tmp_path: Path) -> AsyncIterator[tuple[GatewayHarness, Tokenizer]]:
    """A model whose tokenizer begins prompts with a special token, and whose answers have others."""
    folder = tmp_path / "special"
    shutil.copytree(FOLDER, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([*NAMES])
    begin = (NAMES[0], tokenizer.token_to_id(NAMES[0]))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{NAMES[0]} $A", special_tokens=[begin])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token_id": tokenizer.token_to_id(NAMES[2])}
    (folder / "generation_config.json").write_text(json.dumps(config))
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", "<|special|>", "b", "<|end|>")]
    verifier = FakeVerifier([id_ for each in ids for id_ in each])
    digest = tokenizer_digest((folder / "tokenizer.json").read_bytes())
    size = tokenizer.get_vocab_size()
    async with gateway_harness(
        redis_url, verifier, models={"target": folder}, digest=digest, vocabulary=size
    ) as harness:
        yield harness, tokenizer


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "a<|special|>b"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a<|special|>b<|end|>"),
        ({"stop": "b"}, "a"),
        ({"stop": "b", "include_stop_str_in_output": True}, "ab"),
        ({"stop": ["l|>b", "b"], "skip_special_tokens": False}, "a<|specia"),
    ],
)
async def test_the_text_has_what_the_request_wants_of_stop_strings_and_special_tokens(
    special: tuple[GatewayHarness, Tokenizer], fields: dict[str, Any], text: str
) -> None:
    harness, _ = special
    asked = harness.client.completions
    answer = await asked.create(model="target", prompt="x", max_tokens=9, extra_body=fields)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")
    stream = await asked.create(model="target", prompt="x", max_tokens=9, stream=True, extra_body=fields)
    assert "".join([part.choices[0].text async for part in stream]) == text


async def test_an_answer_that_is_resumed_has_the_same_text(special: tuple[GatewayHarness, Tokenizer]) -> None:
    harness, _ = special
    async with AsyncClient(harness.rig.address) as client:
        made = await client.generate("x", skip_special_tokens=False, include_stop_str_in_output=True, max_tokens=9)
        again = "".join([chunk.text async for chunk in client.resume(made.session_id)])
        assert again == made.text == "a<|special|>b<|end|>"


@pytest.mark.parametrize("added", [None, True, False])
@pytest.mark.parametrize("most", [None, 1, 2, 5, 1000])
async def test_a_prompt_is_truncated_as_transformers_does_and_begins_as_the_request_wants(
    special: tuple[GatewayHarness, Tokenizer], tmp_path: Path, added: bool | None, most: int | None
) -> None:
    harness, _ = special
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "special", truncation_side="left")
    with_special = added is not False
    cut = {} if most is None else {"truncation": True, "max_length": max(most, 2 if with_special else 1)}
    expected = theirs(PROMPT, add_special_tokens=with_special, **cut)["input_ids"]
    fields = {"add_special_tokens": added, "truncate_prompt_tokens": most}
    await harness.client.completions.create(model="target", prompt=PROMPT, max_tokens=1, extra_body=fields)
    assert list(harness.verifier.starts[-1].tokens) == expected[-(most or len(expected)) :]
    if most is not None:
        await harness.client.completions.create(
            model="target", prompt=expected, max_tokens=1, extra_body={"truncate_prompt_tokens": most}
        )
        assert list(harness.verifier.starts[-1].tokens) == expected[-most:]


async def test_a_session_is_not_truncated(special: tuple[GatewayHarness, Tokenizer]) -> None:
    harness, _ = special
    async with AsyncClient(harness.rig.address) as client:
        made = await client.generate("x", max_tokens=2)
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens: does not go with a session"):
            await client.generate("y", session=made.session_id, truncate_prompt_tokens=3)
        for wrong in (0, -2):
            with pytest.raises(InvalidRequest, match="truncate_prompt_tokens: is"):
                await client.generate("y", truncate_prompt_tokens=wrong)


@pytest.mark.parametrize("limit", [None, 1, 5, 40])
async def test_a_prompt_keeps_what_leaves_room_for_its_answer(harness: GatewayHarness, limit: int | None) -> None:
    room = CONTEXT - (limit or 1)
    ids = [5 + at for at in range(3 * CONTEXT)]
    fields = {"truncate_prompt_tokens": -1}
    for prompt in (ids, PROMPT * 9):
        whole = ids if isinstance(prompt, list) else MODEL.tokenizer.encode(PROMPT * 9).ids
        assert len(whole) > CONTEXT
        body: dict[str, Any] = {"model": "target", "prompt": prompt, "max_tokens": limit or -1, "extra_body": fields}
        answer = await harness.client.completions.create(**body)
        assert list(harness.verifier.starts[-1].tokens) == whole[-room:]
        assert (await harness.client.completions.create(**{**body, "max_tokens": 1})).usage is not None
    short = await harness.client.completions.create(model="target", prompt=[5, 6], max_tokens=1, extra_body=fields)
    assert short.usage is not None
    assert (short.usage.prompt_tokens, answer.choices[0].finish_reason) == (2, "length")


async def test_token_ids_are_truncated_before_their_number_is_judged(harness: GatewayHarness) -> None:
    ids = [5 + at for at in range(3 * CONTEXT)]
    fields = {"truncate_prompt_tokens": 7}
    await harness.client.completions.create(model="target", prompt=ids, max_tokens=1, extra_body=fields)
    assert list(harness.verifier.starts[-1].tokens) == ids[-7:]
