"""Heads learn from the target by the same training as drafters, and what it gives drafts for that target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.checkpoints.model_card import read_card
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.heads.config import KINDS, Kind, read_heads_config
from outrider.engine.heads.loading import check_family, load_speculator
from outrider.engine.heads.speculator import HeadNodes, HeadRoot, KeptFeatures
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.settings import EngineSettings
from outrider.errors import ConfigError
from outrider.training.acceptance import TargetTexts, generate_texts
from outrider.training.recipe import HeadsRecipe
from tests.training.family import PAGES, begin, make_target, train

STEPS, DEPTH = 30, 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("family") / "target", layers=4)


def recipe(target: Path, output: Path, kind: Kind, /, **changes: Any) -> HeadsRecipe:
    settings: dict[str, Any] = {
        "text": (str(PAGES),),
        "pattern": "*.md",
        "target": target,
        "output": output,
        "kind": kind,
        "depth": DEPTH,
        "window": 64,
        "batch": 4,
        "tokens": STEPS * 256,
        "warm_up": 0.1,
        "learning_rate": 1e-2,
        "measure_steps": STEPS,
        "threads": 1,
        "precision": "float32",
    }
    return HeadsRecipe(**settings | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_trained_heads_draft_at_the_measured_acceptance(kind: Kind, target: Path, tmp_path: Path) -> None:
    settings = recipe(target, tmp_path / kind, kind)
    training = begin(settings)
    training.measure()
    before = training.progress.measured
    for _ in training.run():
        pass
    after = training.progress.measured
    assert before is not None
    assert after is not None
    assert after.held_out_loss < before.held_out_loss
    card = read_card(settings.output)
    assert card is not None
    assert card.kind == kind
    assert card.acceptance == after.by_name()
    # One text under the noise, root by root: what the folder drafts is accepted as far as was measured of such texts.
    shape = read_heads_config(settings.output)
    engine = CpuEngine.load(
        target, EngineSettings(dtype="float32", slots=2, rows=96, threads=1, features=shape.features)
    )
    generated = generate_texts(engine, [[7, 8, 9, 10] * 4] * 2, temperature=1.0, tokens=40, seed=5)
    with torch.no_grad():
        for weight in training.student.parameters():
            weight.copy_(weight.bfloat16().float())  # as they are saved
    measured = training.task.acceptance(training.student, generated)
    assert drafted(settings.output, target, engine, generated) == pytest.approx(measured, abs=1e-6)


def drafted(heads: Path, target: Path, engine: CpuEngine, generated: TargetTexts) -> float:
    steps = tokens = 0
    speculator = load_speculator(heads, target, precise=True, slots=1, context=96)
    for text, seed in zip(generated.tokens.tolist(), generated.seeds, strict=True):
        ids = torch.tensor(text).numpy()
        engine.forward([Segment(0, 0, ids, torch.arange(len(text)).numpy())])
        features, root = engine.hidden().clone(), generated.prompt
        while root + DEPTH <= len(text):
            sampler = Sampler(Contract(seed=seed, max_tokens=40), engine.vocabulary, text[:root], generated.prompt)
            speculator.open_slot(0, None, 0)
            speculator.add_features(features, [KeptFeatures(0, 0, range(root - 1), text[:root])])
            (row,), _ = speculator.begin([HeadRoot(0, text[:root])])
            chain: list[int] = []
            while row is not None:
                guess = sampler.choose(row.logits, chain).token
                if guess != text[root + len(chain)]:
                    break
                chain.append(guess)
                row = speculator.expand([HeadNodes(len(chain) - 1, guess)])[0] if len(chain) < DEPTH else None
            steps, tokens, root = steps + 1, tokens + len(chain) + 1, root + len(chain) + 1
    return tokens / steps


def test_a_training_of_heads_resumes_where_it_stopped(target: Path, tmp_path: Path) -> None:
    once, twice = (recipe(target, tmp_path / name, "eagle-3", tokens=6 * 256) for name in ("once", "twice"))
    train(once)
    train(twice, steps=3)
    assert train(twice).resumed
    made = [(settings.output / "model.safetensors").read_bytes() for settings in (once, twice)]
    assert made[0] == made[1]


def test_the_target_is_not_trained(target: Path, tmp_path: Path) -> None:
    training = train(recipe(target, tmp_path / "heads", "medusa", tokens=2 * 256))
    lessons: Any = training.task
    assert not any(parameter.requires_grad for parameter in lessons._target.parameters())
    assert len([*training.student.parameters()]) == 2 * DEPTH  # its blocks' alone


def test_targets_and_windows_that_cannot_have_heads_are_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too small for 9 tokens"):
        recipe(target, tmp_path / "heads", "mlp", depth=9, window=16)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 300}', encoding="utf-8")
    with pytest.raises(ConfigError, match="does not give the hidden states"):
        check_family(other)
