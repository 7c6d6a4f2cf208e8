"""Reads files of questions in the forms that benchmarks of language models use.

| form | an entry |
|---|---|
| prompts | `{"prompt": "..."}` |
| Spec-Bench's `question.jsonl`, SPEED-Bench | `{"question_id": 81, "category": "writing", "turns": ["...", "..."]}` |
| ShareGPT | `{"id": "...", "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}` |
| OpenAI's batches | `{"custom_id": "...", "body": {"messages": [...]}}`, or a `prompt` in the body |

A file holds JSON lines, or one JSON array of entries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cli.performance.load import ChatPrompt
from outrider.errors import ConfigError

HUMAN = {"human", "user"}  # authors of ShareGPT's messages whose turn is a question
FORMS = (
    '{"prompt": ...}, Spec-Bench\'s {"turns": [...]}, ShareGPT\'s {"conversations": [...]} or OpenAI\'s {"body": ...}'
)


@dataclass(frozen=True, slots=True)
class Question:
    """An entry: a prompt, or the turns of a conversation."""

    question_id: str | int
    category: str  # empty where the form has none
    turns: tuple[str, ...]  # what the user writes, one turn after the other; one of a prompt
    before: tuple[Mapping[str, Any], ...] = ()  # messages before the first turn
    chat: bool = True  # it is made for a chat model: turns are messages

    def prompt(self, *, raw: bool) -> str | ChatPrompt:
        """Return the request of the first turn. `raw`: as plain text, for a model without a chat template."""
        if raw or not self.chat:
            return self.turns[0]
        return ChatPrompt((*self.before, {"role": "user", "content": self.turns[0]}))


def read_questions(file: Path) -> list[Question]:
    """Return the questions of a file, in its order. Raises ConfigError with the first entry that is none."""
    questions = []
    for number, entry in enumerate(_entries(file), 1):
        try:
            question = _question(entry, number)
        except (KeyError, TypeError, AttributeError, ValueError):
            raise ConfigError(f"{file}: entry {number} is of none of these forms: {FORMS}") from None
        if not question.turns or not all(isinstance(turn, str) and turn for turn in question.turns):
            raise ConfigError(f"{file}: entry {number} holds an empty prompt")
        questions.append(question)
    if not questions:
        raise ConfigError(f"{file}: holds no prompt")
    return questions


def _entries(file: Path) -> Sequence[Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{file}: {reason or error}") from None
    try:
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        raise ConfigError(f"{file}: must hold JSON lines, or one JSON array; each entry is {FORMS}") from None


def _question(entry: Mapping[str, Any], number: int) -> Question:
    if "turns" in entry:
        name = entry.get("question_id", number)
        return Question(name, str(entry.get("category", "")), tuple(entry["turns"]))
    if "conversations" in entry:
        turns = tuple(message["value"] for message in entry["conversations"] if message["from"] in HUMAN)
        return Question(str(entry.get("id", number)), "", turns)
    if "body" in entry:
        name, body = str(entry.get("custom_id", number)), entry["body"]
        if "messages" not in body:
            return Question(name, "", (body["prompt"],), chat=False)
        *before, last = body["messages"]
        return Question(name, "", (last["content"],), tuple(before))
    return Question(str(entry.get("id", number)), "", (entry["prompt"],), chat=False)
