"""Runs the measurement: distributes the prompts among processes with one thread each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.trees.cells import MODELS, Setting
from bench.trees.heads import HeadRows, are_heads
from bench.trees.measuring import Figures, LearnedRates, measure, teach
from bench.trees.paths import PathRows, TextRows, load
from outrider.fleet import process_env

_bench: tuple[Setting, Mapping[str, TextRows], LearnedRates] | None = None  # state of a worker process


def run(
    setting: Setting,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    processes: int,
    report: Callable[[str], None],
) -> list[Figures]:
    """Fit the drafters' statistics on `others`, measure on `prompts`, and return the figures of each prompt.

    `report` receives the progress.
    """
    report(f"{len(others)} prompts to learn from ...")
    models = _models(setting, folder)
    rates = teach(setting, models, others)
    jobs = list(enumerate(prompts))
    results: list[Figures] = []
    with ExitStack() as stack:
        if processes == 1:
            figures: Iterable[Figures] = (measure(setting, models, rates, prompt, at) for at, prompt in jobs)
        else:
            del models
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(context.Pool(processes, _begin, (setting, folder, rates)))
            figures = pool.imap(_measure, jobs)
        for found in figures:
            results.append(found)
            report(f"{len(results)} of {len(prompts)} prompts")
    return results


def _models(setting: Setting, folder: Path) -> dict[str, TextRows]:
    target = folder / "target"
    models: dict[str, TextRows] = {"target": PathRows(load(target))}
    for name, place in ((name, folder / name) for name in MODELS if name in setting.drafters):
        models[name] = PathRows(load(place))
    for name, place in setting.others:
        models[name] = HeadRows(target, place) if are_heads(place) else PathRows(load(place))
    return models


def _begin(setting: Setting, folder: Path, rates: LearnedRates) -> None:
    global _bench
    process_env.set_variables(1)
    _bench = setting, _models(setting, folder), rates


def _measure(job: tuple[int, Sequence[int]]) -> Figures:
    assert _bench is not None
    number, prompt = job
    return measure(*_bench, prompt, number)
