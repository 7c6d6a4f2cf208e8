"""The hidden states that the device's engine gives beside its logits are those of the engine for torch."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.engine.cpu.engine import CpuEngine
from outrider.engine.gpu import DeviceEngine
from outrider.engine.interface.features import Features
from outrider.engine.interface.settings import EngineSettings
from tests.engine.gpu.taped import DEVICE, taped
from tests.engine.small_checkpoints import MODELS, Tree, prompt

SLOTS, HELD = 4, 120


@pytest.mark.parametrize("features", [Features(), Features(all_rows=True), Features((2, 5, 2), all_rows=True)], ids=str)
def test_device_features_equal_those_of_the_cpu_engine(features: Features) -> None:
    device = DeviceEngine.load(
        MODELS / "target", EngineSettings(device=DEVICE, dtype="float32", slots=SLOTS, rows=HELD, features=features)
    )
    native = CpuEngine.load(
        MODELS / "target", EngineSettings(dtype="float32", slots=SLOTS, rows=HELD, threads=1, features=features)
    )
    tapes = taped(device)
    random = np.random.default_rng(2)
    texts = [random.integers(1, device.vocabulary, size) for size in (40, 12, 5)]
    tree = Tree.random(device, random, 9)
    for _ in range(2):
        for engine in (device, native):
            engine.forward([prompt(3, texts[0][:9], wanted=0), prompt(1, texts[1], wanted=0)])
        before = device.hidden().clone()
        assert len(before) == (21 if features.all_rows else 0)
        segments = [prompt(3, texts[0][9:], 9, wanted=1), tree.segment(1, len(texts[1])), prompt(2, texts[2], wanted=0)]
        for engine in (device, native):
            engine.forward(segments)
        ours, theirs = device.hidden().cpu(), native.hidden()
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
    tapes.check_that_the_host_reads_nothing()
    assert not device.begins_next_pass  # what follows would overwrite them
