"""The README's figures come from results of today's format, and are their medians."""

from __future__ import annotations

from typing import Any

import pytest

from bench.report import front
from bench.report.results import FORMAT
from tests.docs.pages import NAMES, ROOT


def take(row: str, speed: float, *, target: int = 150_000_000, temperature: float = 1.0) -> dict[str, Any]:
    return {"row": row, "tokens_per_s": speed, "target": target, "temperature": temperature}


RESULTS: dict[str, Any] = {
    "format": FORMAT,
    "machine": {"when": "2026-11-27T08:00:00+0000", "revision": "abc1234-dirty", "cpu": "CPU", "cores": 2},
    "takes": [
        *(take("distributed", speed) for speed in (140.0, 150.0, 190.0)),
        take("plain", 80.0),
        take("llama.cpp-draft-3", 40.0),
        take("llama.cpp-draft-6", 55.0),
        take("plain", 6.4, target=1_000_000_000, temperature=0.0),
    ],
}


def test_the_table_has_medians_of_the_fastest_row() -> None:
    lines = front.table(RESULTS).splitlines()
    assert lines[0] == f"<!-- figures: format {FORMAT}, 2026-11-27, abc1234, CPU, 2 cores -->"
    assert lines[1].endswith("| 150M, T = 1 | 1B, T = 0 |")
    cells = {line.split(" | ")[0].strip("| *"): line.strip("| ").split(" | ")[1:] for line in lines[3:-1]}
    assert cells["Outrider, distributed"] == ["**150**", "**-**"]
    assert cells["Outrider, plain"] == ["80", "6"]
    assert cells["llama.cpp, the best of two drafted chains"] == ["55", "-"]


def test_the_readme_s_table_is_of_today_s_format() -> None:
    assert front.formats((ROOT / "README.md").read_text(encoding="utf-8")) == [FORMAT, FORMAT]


def test_the_table_of_quantized_models_has_several_runs() -> None:
    def run(target: int) -> dict[str, Any]:
        def text(row: str, *speeds: float) -> dict[str, Any]:
            return {"row": row, "dtype": "Q4_K_M", "target": target, "tokens_per_s": speeds}

        texts = [text("plain", 40.0, 44.0, 42.0), text("llama.cpp", 37.0)]
        return RESULTS | {"takes": [], "formats": [{"texts": []}, {"texts": texts}]}

    lines = front.formats_table([run(10**9), run(8 * 10**9)]).splitlines()
    assert lines[1].endswith("--target 1B'`, Q4_K_M | 1B, T = 1 | 8B, T = 1 |")
    assert lines[3:-1] == ["| llama.cpp | 37 | 37 |", "| Outrider, plain | 42 | 42 |"]


@pytest.mark.parametrize("name", NAMES)
def test_no_page_has_figures_of_an_older_format(name: str) -> None:
    assert set(front.formats((ROOT / name).read_text(encoding="utf-8"))) <= {FORMAT}


def test_results_of_another_format_are_not_written(tmp_path: Any) -> None:
    file = tmp_path / "old.json"
    file.write_text(f'{{"format": {FORMAT + 1}}}', encoding="utf-8")
    with pytest.raises(ValueError, match="measure anew"):
        front.main([file])
