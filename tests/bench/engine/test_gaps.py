"""Gaps of logits are held against transformers' over the dequantized file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from bench.engine.gaps import TEXTS, LogitGap, logits_file, measure_gaps
from bench.engine.passes import OURS
from bench.peers.gguf import write_gguf

MODELS = Path(__file__).parents[3] / "models"


def test_gaps_are_those_of_each_text_and_engine(tmp_path: Path) -> None:
    write_gguf(MODELS / "drafter", file := tmp_path / "drafter.gguf", "float32")
    (tmp_path / "drafter").mkdir()
    shutil.copy(MODELS / "drafter" / "tokenizer.json", tmp_path / "drafter")
    texts = [[*range(40, 60)], [*range(7, 16)]]
    (tmp_path / TEXTS).write_text(json.dumps(texts))
    (ours,) = measure_gaps(1, file, tmp_path)
    assert (ours.engine, len(ours.mean)) == (OURS, 2)
    assert 0.0 < max(ours.widest) < 0.02  # its KV is in bfloat16
    for number, text in enumerate(texts):
        logits = np.load(logits_file(tmp_path, OURS, number))
        assert len(logits) == len(text)
        logits[:, ::2] += 2.0 + number
        np.save(logits_file(tmp_path, "far-away", number), logits)
    far, again = measure_gaps(1, file, tmp_path)
    assert again == ours
    assert far.mean == pytest.approx((1.0, 1.5), abs=2e-3)
    assert far.widest == pytest.approx((2.0, 3.0), abs=0.02)
    assert str(LogitGap("far-away", (1.0, 1.5), (2.0, 3.0))) == "far-away: mean 1.250, widest 3.00"
