"""What a verifier makes of its configuration before it serves."""

from __future__ import annotations

from outrider.config import VerifierConfig
from outrider.engine.interface.engine import SCRATCH
from tests.engine.small_checkpoints import MODELS
from verifier_svc.server import load


def test_a_configured_context_shortens_the_checkpoints() -> None:
    engine, _ = load(VerifierConfig(model=MODELS / "drafter", context=99, slots=2, max_nodes=2))
    assert (engine.context, engine.rows) == (99, 99 + SCRATCH)
    engine, _ = load(VerifierConfig(model=MODELS / "drafter", slots=2, max_nodes=2))
    assert engine.context == 1024


def test_a_quantized_target_is_loaded_as_such() -> None:
    engine, _ = load(
        VerifierConfig(model=MODELS / "drafter", dtype="int8", backend="transformers", slots=2, max_nodes=2)
    )
    assert (engine.dtype, engine.treeless) == ("int8", "")
