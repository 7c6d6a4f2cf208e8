"""Where a training stands, on disk: enough to go on as if nothing had happened.

What is random in a step is a function of the recipe's seed and the step's number, and so is its learning rate where the
budget is in tokens; the model, the moments of AdamW and these few numbers are therefore all there is to keep.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model

from outrider.engine.checkpoint import read_json
from outrider.errors import CheckpointError, ConfigError
from outrider.training.recipe import TrainingRecipe
from outrider.training.saving import recover, replaced

STATE, MODEL, MOMENTS = "state.json", "model.safetensors", "moments.safetensors"
# Of a recipe: what may change between two runs of one training, and what is named by its digest instead.
FREE = {"output", "device", "threads", "measure_steps", "save_steps", "save_minutes"}
NAMED = {"text", "pattern", "field", "skip_invalid", "held_out", "target", "tokenizer", "start"}


@dataclass(slots=True)
class State:
    """How far a training is."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)  # that all its runs must share


def settings_of(recipe: TrainingRecipe, **others: Any) -> dict[str, Any]:
    """What all runs of a training must share, with the digests of what it is made of."""
    return {**recipe.model_dump(mode="json", exclude=FREE | NAMED), **others}


def save(folder: Path, state: State, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Keeps it all, in place of what was kept before. Raises what `replaced` does."""
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
    """Whether a training can go on from a folder."""
    recover(folder)
    return folder.exists()


def read(folder: Path, settings: dict[str, Any]) -> State:
    """Where the training stands that a folder keeps.

    Raises ConfigError for one with other settings, naming them, and CheckpointError for a folder that is damaged.
    """
    try:
        state = State(**read_json(folder / STATE))
    except TypeError as error:
        raise CheckpointError(f"{folder}: is of another version ({error}); remove it, and begin anew") from None
    differing = [name for name in settings if state.settings.get(name) != settings[name]]
    if differing:
        said = ", ".join(f"{name} = {state.settings.get(name)!r}, not {settings[name]!r}" for name in differing)
        raise ConfigError(
            f"{folder}: was begun with {said}; give the same again to go on, or another --output to begin anew"
        )
    return state


def restore(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Puts the weights and the moments back. Raises CheckpointError."""
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
