"""Writes the result of a training: a folder that can draft for its target, with its model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.engine.checkpoints.model_card import ModelCard, write_card
from outrider.training.evaluation import Evaluation
from outrider.training.recipe import TrainingRecipe
from outrider.training.saving.atomic_save import replaced
from outrider.training.saving.state import TrainingState
from outrider.training.tasks.task import TrainingTask


def write_result(
    recipe: TrainingRecipe,
    task: TrainingTask,
    student: Any,
    source: Path,
    target: Path | None,
    state: TrainingState,
    measured: Evaluation | None,
) -> None:
    """Write the student to the recipe's output. `source`: folder of the tokenizer; `target`: the target's, or its file.

    Raises the errors of `replaced`.
    """
    with replaced(recipe.output) as folder:
        task.write(student, source, folder)
        if target is not None:
            write_card(folder, _card(recipe, task.kind, target, state, measured))


def _card(
    recipe: TrainingRecipe, kind: str, target: Path, state: TrainingState, measured: Evaluation | None
) -> ModelCard:
    return ModelCard(
        kind=kind,
        target=target.resolve().name,
        target_digest=state.settings["target"],
        tokenizer_digest=state.settings["tokenizer"],
        objective=recipe.objective,
        tokens=state.tokens,
        seconds=round(state.seconds, 1),
        acceptance=measured.by_name() if measured else {},
        settings=recipe.model_dump(mode="json", exclude={"output"}, exclude_defaults=True),
    )
