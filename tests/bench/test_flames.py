"""Flame graphs: a box's width is its function's share of the event loop's samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cpu.flames import WIDTH, boxes, draw, read

LOOP = "<module> (bench/cpu/server.py:97);run_until_signal (outrider/rpc/lifecycle.py:34)"
PROFILE = f"""\
{LOOP};one (router/a.py:1);two (router/b.py:2) 30
{LOOP};one (router/a.py:5);three<b> (x/site-packages/redis/c.py:2) 50
{LOOP};four (outrider/d.py:1) 20
{LOOP};run_once (asyncio/base_events.py:9);EpollSelector.select (selectors.py:468) 900
run (threading.py:9);work (grpc/x.py:1) 900
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.raw"
    path.write_text(PROFILE, encoding="utf-8")
    return path


def test_flame_boxes_have_the_shares_of_the_loops_time_outside_waiting(profile: Path) -> None:
    root = read(profile)
    assert root.samples == 100
    found = [(box.depth, box.name, box.file, round(box.share, 3)) for box in boxes(root, WIDTH / 100)]
    assert found == [
        (0, "one", "router/a.py", 0.8),
        (1, "three<b>", "redis/c.py", 0.5),
        (1, "two", "router/b.py", 0.3),
        (0, "four", "outrider/d.py", 0.2),
    ]


def test_the_picture_has_both_profiles_and_no_names_that_are_markup(profile: Path) -> None:
    picture = draw([("before", profile), ("after", profile)])
    assert picture.count("<title>one (router/a.py) 80.0%</title>") == 2
    assert ">before</text>" in picture
    assert "three&lt;b&gt;" in picture
    assert "<b>" not in picture


def test_a_profile_without_event_loop_stacks_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.raw"
    other.write_text("run (threading.py:9);work (grpc/x.py:1) 900\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no stacks of an event loop"):
        read(other)
