"""What a training gives: a checkpoint in Hugging Face format that any engine loads; of a drafter, with its card."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch

from outrider.engine.card import Card, write_card
from outrider.training.measuring import Figures
from outrider.training.recipe import DrafterRecipe
from outrider.training.saving import replaced
from outrider.training.state import State

BESIDE = ("tokenizer*", "special_tokens_map.json", "chat_template*", "generation_config.json")  # as the target has it


def write_result(recipe: DrafterRecipe, model: Any, source: Path, state: State, measured: Figures | None) -> None:
    """Puts the model, in bfloat16 and with the tokenizer of `source`, in its place. Raises what `replaced` does."""
    with replaced(recipe.output) as folder:
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
        for pattern in BESIDE:
            for file in source.glob(pattern):
                shutil.copy(file, folder / file.name)
        if recipe.target is not None:
            write_card(folder, _card(recipe, source, state, measured))


def _card(recipe: DrafterRecipe, target: Path, state: State, measured: Figures | None) -> Card:
    return Card(
        kind="drafter",
        target=target.resolve().name,
        target_digest=state.settings["target"],
        tokenizer_digest=state.settings["tokenizer"],
        objective=recipe.objective,
        tokens=state.tokens,
        seconds=round(state.seconds, 1),
        acceptance=measured.by_name() if measured else {},
        settings=recipe.model_dump(mode="json", exclude={"output"}, exclude_defaults=True),
    )
