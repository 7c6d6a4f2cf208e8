"""What is made of the answers to traffic that changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.online import ANSWER, WINDOW, OnlineAnswer, gain, last_line, length, read_pages, windows
from outrider.errors import ConfigError

EACH = WINDOW // ANSWER  # answers of a window


def phase(*steps: int, seconds: float = 1.0) -> list[OnlineAnswer]:
    """Windows of answers, those of one window in the given steps each."""
    return [
        OnlineAnswer(at, (at + 1) * seconds, 0.6, (0,) * ANSWER, each)
        for at, each in enumerate(each for each in steps for _ in range(EACH))
    ]


def test_a_point_is_where_its_window_ends() -> None:
    answers = phase(64, 32, 16)
    assert windows(answers) == [(WINDOW, 2.0), (2 * WINDOW, 4.0), (3 * WINDOW, 8.0)]
    assert windows(answers[:-1], -3 * WINDOW) == [(-2 * WINDOW, 2.0), (-WINDOW, 4.0)]


def test_length_counts_steps_and_not_texts() -> None:
    assert length([*phase(128)[:1], *phase(32)[:1]]) == 256 / 160


def test_the_last_third_is_compared_and_the_whole_of_the_time() -> None:
    without, learning = phase(64, 64, 64), phase(64, 64, 32, seconds=1.25)
    assert gain(without, learning) == 1.0
    assert last_line(without, learning) == "online_gain=1.000 online_cost=0.200"


def test_only_text_files_are_read_as_pages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no texts"):
        read_pages(tmp_path)
    (tmp_path / "a.py").write_text("text")
    (tmp_path / "a.pyc").write_bytes(b"\0")
    assert read_pages(tmp_path) == ["text"]
