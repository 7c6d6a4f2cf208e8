"""The saved state of a training, from which it continues exactly as if it had not been interrupted.

All randomness of a step is a function of the recipe's seed and the step's number, and so is its learning rate if the
budget is in tokens. Therefore the model, the moments of AdamW and a few numbers are all that has to be saved.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model

from outrider.engine.checkpoints.checkpoint import read_json
from outrider.errors import CheckpointError, ConfigError
from outrider.training.recipe import TrainingRecipe
from outrider.training.saving.atomic_save import recover, replaced

STATE, MODEL, MOMENTS = "state.json", "model.safetensors", "moments.safetensors"
# Settings of a recipe that may change between two runs of one training, and those that a digest stands for instead.
FREE = {"output", "minutes", "device", "threads", "measure_steps", "save_steps", "save_minutes", "teacher"}
NAMED = {"text", "pattern", "field", "skip_invalid", "held_out", "target", "tokenizer", "start"}


@dataclass(slots=True)
class TrainingState:
    """The progress of a training."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)  # the settings that all runs of the training must share


def settings_of(recipe: TrainingRecipe, **others: Any) -> dict[str, Any]:
    """Return the settings that all runs of a training must share, with the digests of its texts and models."""
    return {**recipe.model_dump(mode="json", exclude=FREE | NAMED), **others}


def save(folder: Path, state: TrainingState, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Save the state, the model and the optimizer in place of the previous save. Raises as `replaced` does."""
    with replaced(folder) as fresh:
        save_model(model, str(fresh / MODEL))
        moments = {
            f"{index}.{name}": value.contiguous()
            for index, values in optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        save_file(moments, fresh / MOMENTS)
        (fresh / STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")


def is_kept(folder: Path) -> bool:
    """Return whether a folder holds a saved training."""
    recover(folder)
    return folder.exists()


def read(folder: Path, settings: dict[str, Any]) -> TrainingState:
    """Return the state of the training that a folder holds.

    Raises ConfigError if its settings differ, with their names, and CheckpointError for a damaged folder.
    """
    try:
        state = TrainingState(**read_json(folder / STATE))
    except TypeError as error:
        raise CheckpointError(f"{folder}: is of another version ({error}); remove it, and begin anew") from None
    differing = [name for name in settings if state.settings.get(name) != settings[name]]
    if differing:
        listed = ", ".join(f"{name} = {state.settings.get(name)!r}, not {settings[name]!r}" for name in differing)
        raise ConfigError(
            f"{folder}: was begun with {listed}; give the same again to go on, or another --output to begin anew"
        )
    return state


def restore(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the saved weights and moments. Raises CheckpointError."""
    try:
        load_model(model, folder / MODEL)
        kept = load_file(folder / MOMENTS)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be read ({error}); remove it, and begin anew") from None
    moments: dict[int, dict[str, Any]] = {}
    for name, value in kept.items():
        index, _, what = name.partition(".")
        moments.setdefault(int(index), {})[what] = value
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
