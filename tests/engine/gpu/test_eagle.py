"""EAGLE heads on a device grow the levels that passes of the same rows compute; its recordings keep to the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.core.sampling.noise import Draw, generation_base
from outrider.engine.gpu.eagle.fed_eagle import FedEagle
from outrider.engine.heads.config import Kind
from outrider.errors import ConfigError
from tests.engine.gpu.taped import DEVICE, taped
from tests.engine.gpu.test_tree_growth import check, growth_of
from tests.engine.small_checkpoints import make_checkpoint, prompt
from tests.engine.taught import random_heads


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("small"))


def fused(engine: FedEagle, count: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    rows = np.random.default_rng(seed).normal(size=(count, engine.fed_width)).astype(np.float32)
    return (rows.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16, cut off


@pytest.mark.parametrize("kind", ["eagle", "eagle-3"])
def test_grown_levels_equal_passes_over_their_rows(kind: Kind, small: Path, tmp_path: Path) -> None:
    """Of one text the first rows have no features; another one is read in two chunks."""
    random_heads(kind, small, tmp_path)
    engines = [FedEagle.load_heads(tmp_path, small, device=DEVICE, precise=True, slots=3) for _ in range(2)]
    tapes = taped(engines[0])
    texts = [np.random.default_rng(seed).integers(0, engines[0].vocabulary, 30 + seed) for seed in range(2)]
    for engine in engines:
        engine.feed(2, 4, fused(engine, 26, 1), restart=True)
        engine.feed(0, 1, fused(engine, 30, 2), restart=True)
        engine.forward([prompt(0, texts[1][:16], wanted=0)])
    segments = [prompt(2, texts[0], wanted=1), prompt(0, texts[1][16:], 16, wanted=1)]
    draws = [Draw(generation_base(seed, 0), 0.5 * seed) for seed in range(2)]
    grown = check(engines, segments, draws, [growth_of(30), growth_of(31, width=2)], 4)
    assert all((level.parents[0] >= 0).any() for level in grown)
    tapes.check_that_the_host_reads_nothing()


def test_a_call_without_a_row_that_has_features_returns_nothing(small: Path, tmp_path: Path) -> None:
    random_heads("eagle-3", small, tmp_path)
    engine = FedEagle.load_heads(tmp_path, small, device=DEVICE, precise=True, slots=1)
    tokens = np.arange(1, 20)
    assert engine.forward([prompt(0, tokens, wanted=0)]).shape == (0, engine.vocabulary)
    assert engine.sample([prompt(0, tokens, wanted=0)], [None], 64).vocabulary == engine.vocabulary
    with pytest.raises(ValueError, match="whose features were not fed"):
        engine.forward([prompt(0, tokens, wanted=1)])


def test_a_missing_device_is_refused(small: Path, tmp_path: Path) -> None:
    random_heads("eagle", small, tmp_path)
    with pytest.raises(ConfigError, match="there is no cuda:9 here"):
        FedEagle.load_heads(tmp_path, small, device="cuda:9", precise=False, slots=1)
