"""A drafter of the target's own checkpoint: its settings reach the engine, and the registry gets its description."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from drafter_svc.loading import load_part, with_model, without_model
from outrider.config import DrafterConfig
from outrider.errors import ConfigError
from outrider.upstream.ticket_verifier import TicketVerifier
from tests.engine.families import CONTEXT, make_family

TARGET = Path(__file__).parents[2] / "models" / "target"


async def _no_keys() -> dict[bytes, float]:
    return {}


KEYS = TicketVerifier(_no_keys, time.time)


def test_a_drafter_is_loaded_with_the_settings_of_its_section() -> None:
    whole = load_part(DrafterConfig(model=TARGET))
    exit_3 = load_part(DrafterConfig(model=TARGET, dtype="int8", layers=3))
    skipped = load_part(DrafterConfig(model=TARGET, dtype="int8", skip=(5, 1, 2)))
    assert (whole.dtype, exit_3.dtype) == ("bfloat16", "int8")
    assert skipped.parameters == exit_3.parameters < whole.parameters
    assert skipped.weight_bytes == exit_3.weight_bytes < whole.weight_bytes / 2


async def test_the_registry_receives_the_checkpoints_name_and_the_parameters_that_are_left() -> None:
    config = DrafterConfig(model=TARGET, layers=3)
    servicer = with_model(config, "drafter-x", KEYS)
    worker = servicer.describe("127.0.0.1:1")
    assert (worker.model, worker.parameters) == ("target", load_part(config).parameters)
    servicer = with_model(config.model_copy(update={"name": "half"}), "drafter-x", KEYS)
    assert servicer.describe("127.0.0.1:1").model == "half"


def test_a_drafter_without_a_model_reads_no_weights_and_accepts_the_models_targets() -> None:
    servicer = without_model(DrafterConfig(model=TARGET, drafts="suffix", slots=3), "drafter-x")
    worker = servicer.describe("127.0.0.1:1")
    assert (worker.parameters, worker.slots, worker.sessions) == (0, 3, len(servicer.scheduler.members))
    engine = load_part(DrafterConfig(model=TARGET))
    assert (worker.vocabulary, worker.tokenizer_digest) == (engine.vocabulary, engine.tokenizer_digest)


def test_a_layer_that_the_checkpoint_does_not_have_is_a_mistake_in_the_configuration() -> None:
    with pytest.raises(ConfigError, match="skip: the checkpoint has no layer 6"):
        load_part(DrafterConfig(model=TARGET, skip=(6,)))


def test_a_model_that_cannot_grow_a_tree_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = DrafterConfig(model=make_family(tmp_path, "mamba"), dtype="float32")
    with pytest.raises(ConfigError, match=r"model: .* cannot draft, for it cannot grow a tree: its logits over"):
        load_part(config)


def test_a_model_of_another_family_drafts(tmp_path: Path) -> None:
    engine = load_part(DrafterConfig(model=make_family(tmp_path, "gpt2"), dtype="float32", slots=3))
    assert (type(engine).__name__, engine.slots, engine.vocabulary) == ("TransformersEngine", 3, 131)


def test_a_drafter_without_its_model_reads_only_the_configuration(tmp_path: Path) -> None:
    folder = make_family(tmp_path, "gpt2")
    (folder / "model.safetensors").unlink()
    servicer = without_model(DrafterConfig(model=folder, drafts="suffix"), "d")
    described = servicer.describe("h:1")
    assert (described.vocabulary, described.context, described.parameters) == (131, CONTEXT, 0)
