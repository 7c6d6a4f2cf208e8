"""What a training gives: a folder that drafts for its target, with its card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.engine.card import Card, write_card
from outrider.training.measuring import Figures
from outrider.training.pupils import Lessons
from outrider.training.recipe import TrainingRecipe
from outrider.training.saving import replaced
from outrider.training.state import State


def write_result(
    recipe: TrainingRecipe, lessons: Lessons, pupil: Any, source: Path, state: State, measured: Figures | None
) -> None:
    """Puts the pupil in its place. `source`: holds its target's tokenizer. Raises what `replaced` does."""
    with replaced(recipe.output) as folder:
        lessons.write(pupil, source, folder)
        if recipe.target is not None:
            write_card(folder, _card(recipe, lessons.kind, source, state, measured))


def _card(recipe: TrainingRecipe, kind: str, target: Path, state: State, measured: Figures | None) -> Card:
    return Card(
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
