"""A drafter made of the target's own checkpoint: its settings reach the engine, and the registry hears what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter_svc.service import Roster, load
from outrider.config import DrafterConfig
from outrider.errors import ConfigError

TARGET = Path(__file__).parents[2] / "models" / "target"


def test_a_drafter_is_loaded_as_its_section_says() -> None:
    whole = load(DrafterConfig(model=TARGET))
    exit_3 = load(DrafterConfig(model=TARGET, dtype="int8", layers=3))
    skipped = load(DrafterConfig(model=TARGET, dtype="int8", skip=(5, 1, 2)))
    assert (whole.dtype, exit_3.dtype) == ("bfloat16", "int8")
    assert skipped.parameters == exit_3.parameters < whole.parameters
    assert skipped.weight_bytes == exit_3.weight_bytes < whole.weight_bytes / 2


async def test_the_registry_hears_the_checkpoints_name_and_the_parameters_that_are_left() -> None:
    config = DrafterConfig(model=TARGET, layers=3)
    engine = load(config)
    worker = Roster(config, "drafter-x", engine).describe("127.0.0.1:1")
    assert (worker.model, worker.parameters) == ("target", engine.parameters)
    named = Roster(config.model_copy(update={"name": "half"}), "drafter-x", engine).describe("127.0.0.1:1")
    assert named.model == "half"


def test_a_layer_that_the_checkpoint_does_not_have_is_a_mistake_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match="skip: the checkpoint has no layer 6"):
        load(DrafterConfig(model=TARGET, skip=(6,)))
