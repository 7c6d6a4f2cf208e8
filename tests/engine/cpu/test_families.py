"""Families whose layers have other parts than Llama's: the compiled engine computes what transformers does."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.engine import Engine
from outrider.engine.loading import load_engine
from tests.engine.contract import *  # noqa: F403 what every engine that is not bit for bit the same does
from tests.engine.contract import assert_alike
from tests.engine.families import COMPILED, WINDOW, make_family
from tests.engine.small_checkpoints import Reference, prompt, random_tokens

FAMILIES = ("mistral-window", "gemma2", "gemma3", "qwen2-moe", *COMPILED)
SLOTS = 6


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Reference]:
    folder = make_family(tmp_path_factory.mktemp(request.param), request.param)
    engine = load_engine(folder, dtype="float32", slots=SLOTS, threads=2)
    assert isinstance(engine, CpuEngine)
    return engine, Reference.load(folder, attention="eager")


def test_a_text_beyond_every_window_has_the_same_bits_in_every_chunking(pair: tuple[Engine, Reference]) -> None:
    engine, reference = pair
    tokens = random_tokens(engine, np.random.default_rng(5), engine.context - 1)
    whole = engine.forward([prompt(0, tokens)])
    assert_alike(whole, reference.logits(tokens))
    for size in (1, WINDOW - 1, 16, 50):
        parts = [
            engine.forward([prompt(1, tokens[start : start + size], start)]) for start in range(0, len(tokens), size)
        ]
        assert np.array_equal(np.concatenate(parts), whole)
