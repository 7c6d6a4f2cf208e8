"""Files of questions are read in the forms that benchmarks use; what is none of them is refused with its number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.performance.load import ChatPrompt
from outrider.cli.performance.questions import Question, read_questions
from outrider.errors import ConfigError

SPEC_BENCH = {
    "question_id": 81,
    "category": "writing",
    "turns": ["Compose a post.", "Now rewrite it."],
    "reference": [],
}
SPEED_BENCH = {
    "question_id": "a1",
    "category": "coding",
    "sub_category": "x",
    "turns": ["Sort it."],
    "multiturn": False,
}
SHARE_GPT = {
    "id": "c0",
    "conversations": [
        {"from": "human", "value": "Hello"},
        {"from": "gpt", "value": "Hi"},
        {"from": "human", "value": "Bye"},
    ],
}
BATCH = {
    "custom_id": "r1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    },
}
BATCH_PROMPT = {"custom_id": "r2", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def f("}}


def written(folder: Path, *entries: Any) -> Path:
    file = folder / "questions.jsonl"
    file.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n", encoding="utf-8")
    return file


def test_each_form_is_read(tmp_path: Path) -> None:
    found = read_questions(written(tmp_path, {"prompt": "x"}, SPEC_BENCH, SPEED_BENCH, SHARE_GPT, BATCH, BATCH_PROMPT))
    assert found == [
        Question("1", "", ("x",), chat=False),
        Question(81, "writing", ("Compose a post.", "Now rewrite it.")),
        Question("a1", "coding", ("Sort it.",)),
        Question("c0", "", ("Hello", "Bye")),
        Question("r1", "", ("Hello",), ({"role": "system", "content": "Be brief."},)),
        Question("r2", "", ("def f(",), chat=False),
    ]


def test_questions_may_be_one_json_array(tmp_path: Path) -> None:
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([SHARE_GPT, SHARE_GPT]), encoding="utf-8")
    assert [question.question_id for question in read_questions(file)] == ["c0", "c0"]


def test_turns_are_messages_unless_the_model_has_no_template(tmp_path: Path) -> None:
    plain, chat = read_questions(written(tmp_path, {"prompt": "x"}, BATCH))
    assert plain.prompt(raw=False) == "x"
    assert chat.prompt(raw=True) == "Hello"
    assert chat.prompt(raw=False) == ChatPrompt(tuple(BATCH["body"]["messages"]))  # type: ignore[index]


@pytest.mark.parametrize(
    "entry",
    [
        1,
        "text",
        None,
        [],
        {},
        {"prompt": 7},
        {"prompt": ""},
        {"turns": []},
        {"turns": [""]},
        {"turns": [1]},
        {"turns": 5},
        {"conversations": [{"from": "gpt", "value": "Hi"}]},
        {"conversations": [{"value": "Hi"}]},
        {"body": {}},
        {"body": {"messages": []}},
        {"body": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}},
    ],
)
def test_a_malformed_question_is_refused_with_its_number(tmp_path: Path, entry: Any) -> None:
    with pytest.raises(ConfigError, match="entry 2 "):
        read_questions(written(tmp_path, {"prompt": "x"}, entry))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[1", b"", b"[]"])
def test_a_file_without_questions_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"questions\.jsonl: "):
        read_questions(file)


def test_a_missing_question_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl: No such file"):
        read_questions(tmp_path / "none.jsonl")
