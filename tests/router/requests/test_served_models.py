"""A router refuses to start with a tokenizer that it cannot read, and names the file."""

import json
import shutil
from copy import copy
from pathlib import Path

import pytest
from tokenizers import Encoding

from outrider.config import RouterConfig
from outrider.errors import CheckpointError, TooLong, Unavailable
from router.requests.served_models import load_model
from router.server import run

FOLDER = Path(__file__).parents[3] / "models" / "target"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    return tmp_path


async def test_a_prompt_is_encoded_like_by_the_tokenizer_itself(folder: Path) -> None:
    model = load_model("m", folder)
    for text in ("import os\n", "é🙂 " * 3000):
        assert await model.encode(text) == tuple(model.tokenizer.encode(text).ids)


async def test_a_text_that_cannot_fit_is_refused_before_all_of_it_is_tokenized(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenized = load_model("m", folder), 0

    class Counted:
        def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
            nonlocal tokenized
            tokenized += len(text)
            return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    counting = copy(model)
    object.__setattr__(counting, "tokenizer", Counted())
    with pytest.raises(TooLong, match=r"prompt: has over [0-9]+ tokens, must have at most 99: the context has 100"):
        await counting.encode("a b " * 2**20, context=100)
    assert tokenized <= 2**16
    blank = " " * 10_000  # a text of few tokens for its length
    assert await model.encode(blank, context=1000) == await model.encode(blank)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, ()),
        (None, {"eos_token_id": 5}, (5,)),
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 5}, (7, 9)),
        ({}, {"eos_token_id": 5}, (5,)),
    ],
)
def test_end_of_text_ids_come_from_the_first_file_that_names_them(
    folder: Path, generation: object, config: object, expected: tuple[int, ...]
) -> None:
    for name, values in (("generation_config.json", generation), ("config.json", config)):
        if values is not None:
            (folder / name).write_text(json.dumps(values), encoding="utf-8")
    assert load_model("m", folder).eos_ids == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not json"),
        ("config.json", "[1]"),
        ("generation_config.json", '{"eos_token_id": "end"}'),
        ("generation_config.json", '{"eos_token_id": [true]}'),
    ],
)
def test_a_broken_file_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=name):
        load_model("m", folder)


async def test_a_router_without_its_tokenizer_or_its_redis_does_not_start(tmp_path: Path) -> None:
    missing = RouterConfig(listen="127.0.0.1:0", models={"m": tmp_path})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file; models\.m must be a folder"):
        await run(missing, "redis://127.0.0.1:1", announce=print)
    config = RouterConfig(listen="127.0.0.1:0", models={"m": FOLDER})
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 cannot be reached"):
        await run(config, "redis://127.0.0.1:1", announce=print)
