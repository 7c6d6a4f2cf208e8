"""What the benchmark on real text makes of its takes, and its prompts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.real import (
    BOTH,
    DRAFTER,
    LOOKUP,
    OURS,
    PLAIN,
    PROMPTS,
    RealTake,
    compared_cells,
    last_line,
    ratio,
    speed_cells,
    steps,
    table,
)
from bench.report import results_page

SPEEDS = {PLAIN: 10.0, LOOKUP: 12.0, DRAFTER: 20.0, BOTH: 24.0, "llama.cpp": 5.0, "llama.cpp-draft-3": 8.0}


def takes(temperature: float, slower: float = 1.0) -> list[RealTake]:
    """Of two prompts; the second takes `slower` times as long for all rows but llama.cpp's."""
    return [
        RealTake(row, "chat", prompt, temperature, 0, speed / (slower if prompt and row in OURS else 1), speed / 10)
        for prompt in range(2)
        for row, speed in SPEEDS.items()
    ]


def test_a_row_is_compared_with_the_fastest_of_others_at_each_place() -> None:
    peers = ("llama.cpp", "llama.cpp-draft-3")
    assert ratio(takes(0.0), DRAFTER, peers) == 20 / 8
    assert ratio(takes(0.0, 2.0), DRAFTER, peers) == pytest.approx((20 / 8 + 10 / 8) / 2)
    assert ratio(takes(0.0, 2.0), DRAFTER, (PLAIN,)) == 2.0
    assert steps(takes(0.0), BOTH) == 2.4


def test_the_last_line_has_the_best_way_at_both_temperatures() -> None:
    line = last_line(takes(0.0) + takes(1.0), ("llama.cpp", "llama.cpp-draft-3"), "1B")
    assert line.startswith(
        "real: target=1B over_peers_t0=3.00 over_plain_t0=2.40 tokens_a_step_t0=2.40 over_peers_t1=3.00"
    )


def test_ways_that_were_left_out_have_no_column() -> None:
    some = [take for take in takes(0.0) if take.row in (PLAIN, BOTH, "llama.cpp")]
    shown = table(compared_cells(some, ("llama.cpp",)))
    assert [column.header for column in shown.columns] == ["over peers; tokens a step", PLAIN, BOTH]
    speeds = table(speed_cells(some, [PLAIN, BOTH, "llama.cpp"]))
    assert [[*column.cells] for column in speeds.columns] == [[PLAIN, BOTH, "llama.cpp"], ["10", "24", "5"]]
    assert last_line(some, ("llama.cpp",), "8B") == (
        "real: target=8B over_peers_t0=4.80 over_plain_t0=2.40 tokens_a_step_t0=2.40"
    )


def test_a_recorded_run_becomes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_page, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(results_page, "IMAGES", tmp_path)
    machine = {"cpu": "a processor", "cores": 2, "when": "2026-11-30T12:00:00", "revision": "abc"}
    run = {
        "machine": machine,
        "options": {"size": "1000000000", "tokens": "64"},
        "takes": [asdict(take) for take in takes(0.0) + takes(1.0)],
    }
    (tmp_path / "1B.json").write_text(json.dumps(run))
    results_page.main([tmp_path / "1B.json"])
    page = (tmp_path / "results.md").read_text()
    assert "## Padded to 1B, Q4_K_M" in page
    assert "| llama.cpp-draft-3 | 8 | 8 |" in page
    assert "| chat | 1.25; 1.00 | 1.50; 1.20 | 2.50; 2.00 | 3.00; 2.40 |" in page
    assert "(images/results-1B.svg)" in page
    drawn = (tmp_path / "results-1B.svg").read_bytes()
    results_page.main([tmp_path / "1B.json"])
    assert (tmp_path / "results-1B.svg").read_bytes() == drawn


def test_every_category_has_ten_prompts() -> None:
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    counts = Counter(line["category"] for line in lines)
    assert counts == dict.fromkeys(("chat", "code", "summary", "translation", "json"), 10)
    assert len({line["prompt"] for line in lines}) == 50
