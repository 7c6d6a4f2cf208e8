"""A run: the prompts shared out among processes of one thread each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.trees.cells import MODELS, Setting
from bench.trees.measuring import Figures, Lessons, measure, teach
from bench.trees.paths import PathRows, load
from outrider.cli import openmp

_bench: tuple[Setting, Mapping[str, PathRows], Lessons] | None = None  # of a process that shares the work


def run(
    setting: Setting, folder: Path, prompts: Sequence[Sequence[int]], others: Sequence[Sequence[int]], processes: int
) -> list[Figures]:
    """Teaches the drafters on `others` and measures on `prompts`: each one's figures."""
    models = _models(setting, folder)
    lessons = teach(setting, models, others)
    if processes == 1:
        return [measure(setting, models, lessons, prompt, number) for number, prompt in enumerate(prompts)]
    del models
    with multiprocessing.get_context("spawn").Pool(processes, _begin, (setting, folder, lessons)) as pool:
        return pool.starmap(_measure, [(prompt, number) for number, prompt in enumerate(prompts)], chunksize=1)


def _models(setting: Setting, folder: Path) -> dict[str, PathRows]:
    return {
        name: PathRows(load(folder / name))
        for name in ("target", *(each for each in MODELS if each in setting.drafters))
    }


def _begin(setting: Setting, folder: Path, lessons: Lessons) -> None:
    global _bench
    openmp.settle(1)
    _bench = setting, _models(setting, folder), lessons


def _measure(prompt: Sequence[int], number: int) -> Figures:
    assert _bench is not None
    return measure(*_bench, prompt, number)
