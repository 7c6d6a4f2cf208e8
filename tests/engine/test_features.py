"""The hidden states that an engine gives beside its logits are those that transformers computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.features import Features
from outrider.engine.interface.settings import EngineSettings
from outrider.engine.loading import load_engine
from outrider.errors import ConfigError
from tests.engine.conftest import EngineClass
from tests.engine.ranked import ranked
from tests.engine.small_checkpoints import MODELS, Reference, Tree, prompt

TARGET = MODELS / "target"
HEAD, ALL, LAYERS = Features(), Features(all_rows=True), Features((2, 5, 2), all_rows=True)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference.load(TARGET)


def engine_of(engine_class: EngineClass, features: Features) -> Engine:
    return engine_class.load(TARGET, EngineSettings(dtype="float32", slots=8, threads=1, features=features))


def hidden_states(reference: Reference, features: Features, tokens: np.ndarray) -> np.ndarray:
    """transformers' own: its last ones are normed, the others the outputs of the first layers."""
    with torch.no_grad():
        found = reference.model(torch.tensor([tokens.tolist()]), output_hidden_states=True).hidden_states
    return torch.cat([found[layer][0] for layer in features.layers or (-1,)], -1).numpy()


def mixed(engine: Engine, texts: list[np.ndarray], tree: Tree) -> tuple[list[Segment], list[list[np.ndarray]]]:
    """A pass with a prompt's chunk, a tree and a whole prompt, its segments not in the order of their slots; and for
    each segment's rows the texts that they end."""
    engine.forward([prompt(5, texts[0][:9], wanted=0), prompt(1, texts[1], wanted=0)])
    segments = [
        prompt(5, texts[0][9:], 9, wanted=1),
        tree.segment(1, len(texts[1])),
        prompt(3, texts[2], wanted=0),
    ]
    chains = [
        [texts[0][: row + 1] for row in range(9, len(texts[0]))],
        [np.concatenate([texts[1], tree.tokens[tree.path(node)]]) for node in range(len(tree.tokens))],
        [texts[2][: row + 1] for row in range(len(texts[2]))],
    ]
    return segments, chains


@pytest.mark.parametrize("features", [HEAD, ALL, LAYERS])
def test_features_are_the_hidden_states_of_transformers(
    features: Features, engine_class: EngineClass, reference: Reference
) -> None:
    engine, random = engine_of(engine_class, features), np.random.default_rng(3)
    texts = [random.integers(1, engine.vocabulary, size) for size in (40, 12, 5)]
    segments, chains = mixed(engine, texts, Tree.random(engine, random, 9))
    logits = engine.forward(segments)
    kept = [
        rows if features.all_rows else rows[len(rows) - it.outputs :] for it, rows in zip(segments, chains, strict=True)
    ]
    expected = np.stack([hidden_states(reference, features, text)[-1] for rows in kept for text in rows])
    assert np.abs(engine.hidden().numpy() - expected).max() < 1e-4 * np.abs(expected).max()
    plain = engine_class.load(TARGET, EngineSettings(dtype="float32", slots=8, threads=1))
    mixed(plain, texts, Tree.random(plain, np.random.default_rng(4), 3))
    assert np.abs(plain.forward(segments) - logits).max() < 1e-4


def test_rank_0_of_two_gives_the_features_of_one() -> None:
    alone, segment = engine_of(CpuEngine, ALL), prompt(0, np.arange(1, 20), wanted=1)
    alone.forward([segment])
    with ranked(2, TARGET, features=ALL) as ranks, ranks.lead(TARGET) as leader:
        assert leader.features == ALL
        leader.forward([segment])
        assert (leader.hidden() - alone.hidden()).abs().max() < 1e-4


def test_features_that_an_engine_lacks_are_refused(engine_class: EngineClass) -> None:
    with pytest.raises(ConfigError, match="output of layer 6, and the target's layers below its last one are 1 to 5"):
        engine_of(engine_class, Features((2, 6), all_rows=True))
    with pytest.raises(ConfigError, match="only the native backend gives"):
        load_engine(TARGET, dtype="float32", slots=1, features=HEAD, backend="transformers")
