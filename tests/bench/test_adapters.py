"""The bench of adapters, on the reference target as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import adapters
from bench.adapters import Gaps, PassSeconds, last_line, measure_loading, measure_passes
from bench.low_rank_files import make_adapter
from outrider.engine.checkpoints.checkpoint import read_config

TARGET = Path("models") / "target"


def test_the_line_for_scripts_has_the_ratios_of_medians() -> None:
    passes = PassSeconds([1.0, 1.0, 9.0], [1.25], [2.0])
    assert last_line(passes, Gaps([0.03], [0.02, 0.1, 0.01])) == (
        "adapters: one=0.80 four=0.50 gap_ms=30 usual_gap_ms=20"
    )


@pytest.mark.extended
async def test_passes_and_loading_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "PAUSE_S", 0.2)
    config = read_config(TARGET)
    folders = [make_adapter(tmp_path / f"a{seed}", config, 4, seed) for seed in range(2)]
    passes = measure_passes(TARGET, folders, 1, rounds=2)
    assert [len(seconds) for seconds in (passes.none, passes.one, passes.four)] == [2, 2, 2]
    gaps = await measure_loading(TARGET, tmp_path, ["a0", "a1"], 1, loads=2)
    assert all(gap > 0 for gap in (*gaps.loading, *gaps.usual))
