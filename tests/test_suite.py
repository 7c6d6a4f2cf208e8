"""What runs the tests: parts of the same length that leave nothing out, no silent skip, and none that cannot fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lanes import ROOT, Lane, balanced, read_table, write_table
from tests.skips import ALLOWED
from tests.toothless import toothless


def test_lanes_are_equally_long_and_cover_every_file() -> None:
    files = {f"tests/core/test_{number}.py" for number in range(20)} | {"tests/e2e/test_a.py", "tests/e2e/test_b.py"}
    seconds = {file: 1.0 + (number % 7) for number, file in enumerate(sorted(files))}
    one, other = balanced(files, seconds, 2)
    assert one | other == files
    assert not one & other
    loads = [sum(seconds[file] for file in lane) for lane in (one, other)]
    assert abs(loads[0] - loads[1]) <= max(seconds.values())
    assert len({"tests/e2e/test_a.py", "tests/e2e/test_b.py"} & one) in (0, 2)  # they share a cluster


def test_every_test_file_is_in_one_lane() -> None:
    files = list((ROOT / "tests").rglob("test_*.py"))
    lanes = [Lane(f"{number}/3", None) for number in (1, 2, 3)]
    for path in files:
        assert [lane.pytest_ignore_collect(path) for lane in lanes].count(None) == 1, path


def test_every_process_makes_equal_lanes() -> None:
    """The order of a set is another one in each, and so may be a sum."""
    script = (
        "from tests.lanes import balanced; table = {f'tests/e2e/test_{n}.py': n / 10 for n in range(1, 30)}; "
        "table['tests/core/test_a.py'] = 43.5; print([sorted(lane) for lane in balanced({*table}, table, 2)])"
    )
    made = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(8)
    }
    assert len(made) == 1


@pytest.mark.parametrize("lane", ["0/2", "3/2", "1", "a/b", "1/2/3"])
def test_a_malformed_lane_is_refused(lane: str) -> None:
    with pytest.raises(pytest.UsageError, match="--lane"):
        Lane(lane, None)


def test_a_table_begins_with_the_slowest(tmp_path: Path) -> None:  # bites: of what runs the tests
    write_table(tmp_path / "table", {"b": 1.25, "a": 1.25, "c": 30.0})
    assert [*read_table(tmp_path / "table")] == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("reason", "status"), [("the moon is full", 1), (next(iter(ALLOWED)), 0)], ids=["surprising", "allowed"]
)
def test_a_skip_that_is_not_allowed_fails_the_run(reason: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.skips import NoSkips\ndef pytest_configure(config): config.pluginmanager.register(NoSkips())\n"
    )
    (tmp_path / "test_it.py").write_text(
        f"import pytest\ndef test_good(): assert True\n@pytest.mark.skip(reason={reason!r})\ndef test_it(): pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stdout
    assert ("test_it: the moon is full; install what it needs" in done.stdout.replace("\n", " ")) is bool(status)


TOOTHLESS = """
import outrider, pytest

def test_without_an_assertion(): outrider.connect()
def test_without_the_product(): assert 1 + 1 == 2
def test_weak(): assert outrider.count() > 0
def test_early(flag):
    if flag:
        return
    assert outrider.right()
def test_swallowed():
    try:
        assert outrider.right()
    except AssertionError:
        pass
def test_repeated():
    for _ in range(3):
        good = outrider.right()
        if good:
            break
    assert good
def test_that_bites(): assert outrider.count() == 3
def test_excused():  # bites: it raises
    outrider.check()
"""


def test_tests_that_cannot_fail_are_found(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TOOTHLESS, encoding="utf-8")
    assert [(one.kind, one.test) for one in toothless(tmp_path / "test_them.py")] == [
        ("no-assertion", "test_without_an_assertion"),
        ("no-product", "test_without_the_product"),
        ("weak", "test_weak"),
        ("early-return", "test_early"),
        ("swallowed", "test_swallowed"),
        ("repeated", "test_repeated"),
    ]
