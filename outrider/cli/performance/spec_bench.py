"""Answers each question of a file once without and once with speculation, and writes both in Spec-Bench's form.

Its `evaluation/speed.py --file-path FOLDER/outrider.jsonl --base-path FOLDER/outrider-plain.jsonl` reads them
(https://github.com/hemingkx/Spec-Bench).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outrider.cli.command import figures_table
from outrider.cli.performance.load import ChatPrompt, request_of
from outrider.cli.performance.questions import Question

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.client import AsyncClient, Generation

FILES = {False: "outrider-plain.jsonl", True: "outrider.jsonl"}  # by whether it speculates


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """The answers to all turns of a question, one way."""

    question: Question
    speculative: bool
    answers: tuple[Generation, ...]
    seconds: tuple[float, ...]  # of each turn, measured by the caller

    @property
    def tokens(self) -> int:
        """Tokens of all turns."""
        return sum(answer.usage.completion_tokens for answer in self.answers)

    @property
    def steps(self) -> int:
        """Verifier steps of all turns."""
        return sum(answer.usage.steps for answer in self.answers)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How questions are asked."""

    model: str
    max_tokens: int
    temperature: float
    raw: bool  # turns are plain text, one behind the other, and no messages


async def answer_questions(
    client: AsyncClient, questions: Sequence[Question], options: AnswerOptions, done: Callable[[AnsweredQuestion], None]
) -> None:
    """Ask all questions, one after the other; the order of the two ways alternates. `done` receives each."""
    for number, question in enumerate(questions):
        for speculative in (False, True) if number % 2 else (True, False):
            done(await _ask(client, question, options, speculative=speculative))


async def _ask(
    client: AsyncClient, question: Question, options: AnswerOptions, *, speculative: bool
) -> AnsweredQuestion:
    speculation: Literal["off"] | None = None if speculative else "off"
    raw = options.raw or not question.chat
    messages, text = [*question.before], ""
    answers: list[Generation] = []
    seconds: list[float] = []
    for turn in question.turns:
        messages.append({"role": "user", "content": turn})
        text += turn
        prompt, keywords = request_of(text if raw else ChatPrompt(tuple(messages)))
        began = time.perf_counter()
        answer = await client.generate(
            prompt,
            **keywords,
            model=options.model,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=0,
            speculation=speculation,
        )
        seconds.append(time.perf_counter() - began)
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text})
        text += answer.text
    return AnsweredQuestion(question, speculative, tuple(answers), tuple(seconds))


def write_answers(folder: Path, answered: Sequence[AnsweredQuestion]) -> None:
    """Write both files. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for speculative, name in FILES.items():
        lines = [json.dumps(entry(one)) for one in answered if one.speculative is speculative]
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def entry(answered: AnsweredQuestion) -> dict[str, Any]:
    """Return a line of Spec-Bench's file of answers."""
    question, answers = answered.question, answered.answers
    name = "outrider" if answered.speculative else "outrider-plain"
    return {
        "question_id": question.question_id,
        "category": question.category,
        "answer_id": answers[0].session_id,
        "model_id": f"{answers[0].model}-{name}",
        "choices": [
            {
                "index": 0,
                "turns": [answer.text for answer in answers],
                "decoding_steps": [answer.usage.steps for answer in answers],
                "new_tokens": [answer.usage.completion_tokens for answer in answers],
                "wall_time": list(answered.seconds),
                "accept_lengths": [length for answer in answers for length in accept_lengths(answer)],
            }
        ],
        "tstamp": time.time(),
    }


def accept_lengths(answer: Generation) -> Iterator[int]:
    """Yield for each step of a generation how many tokens it committed, as far as depths of accepted paths tell; not in
    the order of the steps. The mean is the acceptance length."""
    usage = answer.usage
    reached = [usage.steps, *usage.reached_by_depth, 0]
    for depth, (here, deeper) in enumerate(pairwise(reached)):
        yield from [depth + 1] * (here - deeper)


def answers_table(answered: Sequence[AnsweredQuestion]) -> Table:
    """Return a row for each category and one for all: tokens a second of both ways, and what a step committed."""
    columns = ("category", "questions", "plain\ntok/s", "spec.\ntok/s", "\nspeedup", "accept.\nlength", "same\ntexts")
    table = figures_table(*columns)
    for category in [*dict.fromkeys(one.question.category for one in answered), None]:
        here = [one for one in answered if category in (None, one.question.category)]
        if category is None:
            table.add_section()
        plain, spec = ([one for one in here if one.speculative is way] for way in (False, True))
        speeds = [_speed(side) for side in (plain, spec)]
        texts = [
            {one.question.question_id: [answer.text for answer in one.answers] for one in side}
            for side in (plain, spec)
        ]
        same = sum(texts[0][question] == texts[1].get(question) for question in texts[0])
        table.add_row(
            "all" if category is None else category or "-",
            str(len(spec)),
            f"{speeds[0]:.1f}",
            f"{speeds[1]:.1f}",
            f"{speeds[1] / speeds[0]:.2f}" if speeds[0] else "-",
            f"{sum(one.tokens for one in spec) / max(sum(one.steps for one in spec), 1):.2f}",
            f"{same} of {len(plain)}",
        )
    return table


def _speed(answered: Sequence[AnsweredQuestion]) -> float:
    """Return the tokens a second, first tokens and their prompts included."""
    seconds = sum(sum(one.seconds) for one in answered)
    return sum(one.tokens for one in answered) / seconds if seconds else 0.0
