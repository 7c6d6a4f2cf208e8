"""A drafter that dials takes the model and the threads that suit."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter_svc import choice
from drafter_svc.choice import MeasuredModel, best_of, with_threads
from outrider.config import DrafterConfig

PASS_S = 0.1


def measured(name: str, level_ms: float, parameters: int, pass_s: float = PASS_S) -> MeasuredModel:
    return MeasuredModel(Path(name), 1, level_ms / 1e3, parameters, pass_s)


@pytest.mark.parametrize(
    ("found", "best"),
    [
        ([measured("small", 1, 10), measured("middle", 9, 100), measured("large", 30, 1000)], "middle"),
        ([measured("slow", 30, 10), measured("slower", 40, 100)], "slow"),
        ([measured("small", 1, 10, 0.0), measured("large", 2, 100, 0.0)], "small"),
    ],
    ids=["the largest that is quick enough", "none is quick enough", "nothing is known of the target"],
)
def test_the_largest_model_is_best_whose_level_is_short_beside_the_targets_pass(
    found: list[MeasuredModel], best: str
) -> None:
    assert best_of(found).model == Path(best)


@pytest.mark.parametrize(
    ("config", "times", "threads"),
    [
        ({}, {1: 8.0, 2: 5.0, 4: 3.0, 8: 2.9}, 4),
        ({}, {1: 8.0, 2: 7.5}, 1),
        ({"threads": 2}, {2: 5.0}, 2),
        ({"device": "gpu"}, {1: 5.0}, 1),
    ],
)
def test_threads_are_doubled_while_levels_become_faster(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, object], times: dict[int, float], threads: int
) -> None:
    monkeypatch.setattr(choice, "_level", lambda one: (times[one.threads], 7))
    monkeypatch.setattr(choice.os, "cpu_count", lambda: 8)
    assert with_threads(DrafterConfig(model=Path("m"), **config)) == (threads, times[threads], 7)  # type: ignore[arg-type]
