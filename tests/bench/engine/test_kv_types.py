"""Both types of KV are measured in each cell."""

from __future__ import annotations

import pytest

from bench.engine import kv_types
from tests.engine.small_checkpoints import MODELS


def test_every_context_and_number_of_rows_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kv_types, "ROWS", (1, 3))
    kv_types.main(MODELS / "drafter", context=[40, 1100], rounds=2, tokens=60)
    printed = capsys.readouterr().out
    cells = [line.split("│") for line in printed.splitlines() if line.startswith("│")]
    assert [(it[1].strip(), it[2].strip()) for it in cells] == [
        ("40", "1"),
        ("40", "3"),
        ("1,100", "1"),
        ("1,100", "3"),
    ]
    assert all(float(it.strip()) > 0 for cell in cells for it in cell[3:6])
    assert "bytes of a token: auto 2,048 int8 1,088" in printed
    assert "kv_types: gap_mean=0.0" in printed
