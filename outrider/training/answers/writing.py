"""Has a target write what its drafter learns from, in a folder that a later run goes on with."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from outrider.core.session.digest import mix64
from outrider.engine.checkpoints.checkpoint import has_blocks, read_outline
from outrider.engine.interface.engine import Dtype
from outrider.engine.loading import load_engine
from outrider.errors import ConfigError
from outrider.training.answers.answer_store import AnswerStore
from outrider.training.answers.dialogue import Dialogues, read_prompts
from outrider.training.answers.teacher import AT_ONCE, MOST_ASKED, TEMPERATURES, Teacher
from outrider.training.data.corpus import OnProgress
from outrider.training.recipe import WRITING, DrafterRecipe, TrainingRecipe

LEAST = 64  # texts that a training needs: of fewer, none could be held out
TIMES = "seconds.json"


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
        on_progress("loading the target that writes", 0.0)
        engine = load_engine(
            target,
            dtype=serving_dtype(target, device),
            device=device,
            slots=AT_ONCE,
            rows=rows,
            threads=torch.get_num_threads(),
        )
        try:
            if len(answers) != len(asked):
                answers.clear()
                for text in Teacher(engine, iter(asked), first_seed=0, most=recipe.answer).texts():
                    if text is not None:
                        answers.add(text)
                    on_progress("the target answers questions", len(answers) / len(asked))
            first = store.last_seed + 1 if len(store) else mix64(recipe.seed) >> 16
            for text in Teacher(engine, iter(dialogues), first_seed=first, most=recipe.answer).texts():
                if text is not None:
                    store.add(text)
                done = max(store.chosen / recipe.answers, spent.share)
                on_progress("the target writes answers", done)
                if done >= 1.0:
                    break
        finally:
            spent.save()
            engine.close()
    if len(store) < LEAST:
        raise ConfigError(f"minutes: the target wrote {len(store)} texts, a training takes {LEAST}; give more minutes")
    categories = [questions[answers.read(text).seed // len(TEMPERATURES)].category for text in range(len(answers))]
    return Written(store, answers, tuple(categories))


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
