"""Has a target write what its drafter learns from, in a folder that a later run goes on with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from outrider.core.session.digest import mix64
from outrider.engine.checkpoints.checkpoint import has_blocks, read_outline
from outrider.engine.interface.engine import Dtype
from outrider.engine.loading import load_engine
from outrider.errors import ConfigError
from outrider.training.answers.answer_store import AnswerStore, TargetAnswer
from outrider.training.answers.dialogue import Dialogues, Prompt, read_prompts
from outrider.training.answers.remote_teacher import RemoteTeacher
from outrider.training.answers.teacher import AT_ONCE, MOST_ASKED, TEMPERATURES, Teacher
from outrider.training.data.corpus import OnProgress
from outrider.training.recipe import WRITING, DrafterRecipe, TrainingRecipe

LEAST = 64  # texts that a training needs: of fewer, none could be held out
TIMES = "seconds.json"

_TextsOf = Callable[[Iterator[Prompt], int], Generator[TargetAnswer | None]]


class Written(NamedTuple):
    """What a target has written."""

    texts: AnswerStore
    questions: AnswerStore  # answers to the questions that drafters are measured on; empty without such
    categories: tuple[str, ...]  # of the questions' answers


def write_answers(recipe: TrainingRecipe, target: Path, device: str, on_progress: OnProgress) -> Written:
    """Return the target's texts: those of an earlier run, and new ones until there are enough or time is spent.

    Raises ConfigError for a target that writes none, and CheckpointError for one that cannot be read and a full disk.
    """
    folder = recipe.run / "answers"
    prompts = read_prompts(recipe.prompts, "prompts") if recipe.prompts else []
    measured = recipe.questions if isinstance(recipe, DrafterRecipe) else None
    questions = read_prompts(measured, "questions") if measured else []
    dialogues = Dialogues(target, [it.content for it in prompts])
    # Each question three times in a row: the seeds of its answers, and so their temperatures, are consecutive.
    asked = [dialogues.asked(it.content) for it in questions for _ in TEMPERATURES]
    given = dialogues.longest + (0 if prompts else MOST_ASKED)
    rows = max(given, *(len(it.before) for it in asked), 0) + recipe.answer
    if rows > (context := read_outline(target).context):
        raise ConfigError(
            f"answer: with the longest prompt a text has {rows} tokens; the target's context has {context}"
        )
    store, answers = AnswerStore(folder), AnswerStore(recipe.run / "questions")
    spent = _Seconds(folder / TIMES, None if recipe.minutes is None else 60.0 * WRITING * recipe.minutes)
    if len(answers) != len(asked) or (store.chosen < recipe.answers and not spent.over):
        on_progress("the target writes", 0.0)
        with _teacher(recipe, target, device, rows) as texts_of:
            if len(answers) != len(asked):
                answers.clear()
                with closing(texts_of(iter(asked), 0)) as texts:
                    for text in texts:
                        if text is not None:
                            answers.add(text)
                        on_progress("the target answers questions", len(answers) / len(asked))
            first = store.last_seed + 1 if len(store) else mix64(recipe.seed) >> 16
            with closing(texts_of(iter(dialogues), first)) as texts:
                for text in texts:
                    if text is not None:
                        store.add(text)
                        spent.save()  # a run may be killed
                    done = max(store.chosen / recipe.answers, spent.share)
                    on_progress("the target writes answers", done)
                    if done >= 1.0:
                        break
    if len(store) < LEAST:
        raise ConfigError(f"minutes: the target wrote {len(store)} texts, a training takes {LEAST}; give more minutes")
    categories = [questions[answers.read(text).seed // len(TEMPERATURES)].category for text in range(len(answers))]
    return Written(store, answers, tuple(categories))


@contextmanager
def _teacher(recipe: TrainingRecipe, target: Path, device: str, rows: int) -> Iterator[_TextsOf]:
    """Yield what writes texts for prompts, with seeds from a first one on: a cluster, or an engine of this process."""
    if (address := recipe.teacher) is not None:
        yield lambda prompts, first: RemoteTeacher(
            address, target, prompts, first_seed=first, most=recipe.answer
        ).texts()
        return
    engine = load_engine(
        target,
        dtype=serving_dtype(target, device),
        device=device,
        slots=AT_ONCE,
        rows=rows,
        threads=torch.get_num_threads(),
    )
    try:
        yield lambda prompts, first: Teacher(engine, prompts, first_seed=first, most=recipe.answer).texts()
    finally:
        engine.close()


def serving_dtype(checkpoint: Path, device: str) -> Dtype | Literal["auto"]:
    """Return the type in which a checkpoint serves fastest."""
    return "auto" if device != "cpu" or has_blocks(checkpoint) else "int8"


class _Seconds:
    """The time that a target has written, in all runs."""

    def __init__(self, file: Path, limit: float | None) -> None:
        self._file = file
        self._limit = limit
        self._before = float(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else 0.0
        self._began = time.monotonic()

    @property
    def _now(self) -> float:
        return self._before + time.monotonic() - self._began

    @property
    def share(self) -> float:
        """The share of its time that is spent."""
        return 0.0 if self._limit is None else self._now / self._limit

    @property
    def over(self) -> bool:
        """Whether its time is spent."""
        return self.share >= 1.0

    def save(self) -> None:
        """Keep it for a later run."""
        self._file.write_text(json.dumps(self._now), encoding="utf-8")
