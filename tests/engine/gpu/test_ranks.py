"""Two ranks of the device's engine compute what one does, and rank 0 draws the tokens. Over gloo; NCCL needs GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.core.sampling.noise import Draw
from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.gpu import DeviceEngine
from outrider.engine.interface.settings import EngineSettings
from tests.engine.ranked import LOADING, ranked
from tests.engine.small_adapters import make_adapter
from tests.engine.small_checkpoints import Tree, assert_same, make_checkpoint, prompt, random_tokens
from tests.engine.tensor_parallel.test_adapters import load

SHAPES = ("grouped", "one-kv-head-llama3", "untied-wide-heads", "biased", "qwen3")
FFN = 96


def test_each_rank_adds_its_part_of_an_adapter(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "grouped", FFN)
    adapter = make_adapter(folder, tmp_path / "adapter")
    with ranked(2, folder, by="torch", device="cpu", adapters=1) as ranks, ranks.lead(folder) as leader:
        alone = CpuEngine.load(folder, EngineSettings(**LOADING))
        random = np.random.default_rng(2)
        chain = prompt(1, random_tokens(alone, random, 40))
        tree = Tree.random(alone, random, 9).segment(1, 40)
        ours, theirs = load(leader, adapter), alone.load_adapter(adapter)[0]
        plain = alone.forward([chain])
        for segment in (chain, tree):
            found = leader.forward([replace(segment, adapter=ours)])
            expected = alone.forward([replace(segment, adapter=theirs)])
            assert np.abs(found - expected).max() <= 2e-5 * max(1.0, float(expected.std()))
        assert np.abs(leader.forward([replace(chain, adapter=ours)]) - plain).max() > 0.1
        assert_same(leader.forward([chain]), plain)


def test_shares_of_every_shape_add_up(tmp_path: Path) -> None:
    folders = [make_checkpoint(tmp_path / shape, shape, FFN) for shape in SHAPES]
    with ranked(2, *folders, by="torch", device="cpu") as ranks:
        for folder in folders:
            alone = CpuEngine.load(folder, EngineSettings(**LOADING))
            single = DeviceEngine.load(folder, EngineSettings(device="cpu", dtype="float32", slots=8))
            random = np.random.default_rng(1)
            tokens = random_tokens(alone, random, 90)
            tree = Tree.random(alone, random, 9).segment(1, 80)
            with ranks.lead(folder) as leader:
                assert leader.parameters == alone.parameters
                assert leader.samples_tokens
                assert_same(leader.forward([prompt(1, tokens)]), alone.forward([prompt(1, tokens)]))
                for engine in (alone, leader, single):
                    engine.forward([prompt(1, tokens[:80], wanted=0)])
                    engine.copy(1, 4, 70)
                    engine.forward([tree])
                    engine.move(1, np.array([82, 85]), np.array([80, 81]))
                segments = [prompt(4, tokens[:2], 70), prompt(1, tokens[:1], 82)]
                assert_same(leader.forward(segments), alone.forward(segments))
                ours, theirs = (engine.sample(segments, [Draw(5, 1.0), None]) for engine in (leader, single))
                for row in range(2):
                    chosen, expected = ours.choice(row), theirs.choice(row)
                    assert chosen is not None
                    assert expected is not None
                    assert chosen.token == expected.token
                    assert chosen.gap == pytest.approx(expected.gap, abs=1e-4)
                assert ours.choice(2) is None
                assert_same(ours.row(2)[None], theirs.row(2)[None])
