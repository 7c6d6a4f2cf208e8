"""A run: the prompts shared out among processes of one thread each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.trees.cells import MODELS, Setting
from bench.trees.heads import HeadRows, are_heads
from bench.trees.measuring import Figures, Lessons, measure, teach
from bench.trees.paths import PathRows, Rows, load
from outrider.fleet import surroundings

_bench: tuple[Setting, Mapping[str, Rows], Lessons] | None = None  # of a process that shares the work


def run(
    setting: Setting,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    processes: int,
    say: Callable[[str], None],
) -> list[Figures]:
    """Teaches the drafters on `others` and measures on `prompts`: each one's figures. `say` hears how far it is."""
    say(f"{len(others)} prompts to learn from ...")
    models = _models(setting, folder)
    lessons = teach(setting, models, others)
    jobs = list(enumerate(prompts))
    results: list[Figures] = []
    with ExitStack() as stack:
        if processes == 1:
            figures: Iterable[Figures] = (measure(setting, models, lessons, prompt, at) for at, prompt in jobs)
        else:
            del models
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(context.Pool(processes, _begin, (setting, folder, lessons)))
            figures = pool.imap(_measure, jobs)
        for found in figures:
            results.append(found)
            say(f"{len(results)} of {len(prompts)} prompts")
    return results


def _models(setting: Setting, folder: Path) -> dict[str, Rows]:
    target = folder / "target"
    models: dict[str, Rows] = {"target": PathRows(load(target))}
    for name, place in ((name, folder / name) for name in MODELS if name in setting.drafters):
        models[name] = PathRows(load(place))
    for name, place in setting.others:
        models[name] = HeadRows(target, place) if are_heads(place) else PathRows(load(place))
    return models


def _begin(setting: Setting, folder: Path, lessons: Lessons) -> None:
    global _bench
    surroundings.settle(1)
    _bench = setting, _models(setting, folder), lessons


def _measure(job: tuple[int, Sequence[int]]) -> Figures:
    assert _bench is not None
    number, prompt = job
    return measure(*_bench, prompt, number)
