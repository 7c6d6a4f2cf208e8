"""Runs a training for `outrider train`: shows its progress, and saves when it is interrupted."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from outrider.cli.command import INTERRUPTED
from outrider.engine.transformers.quiet import quiet
from outrider.training.recipe import TrainingRecipe
from outrider.training.saving.atomic_save import claimed

if TYPE_CHECKING:
    from outrider.training.expected_gain import ExpectedGain
    from outrider.training.saving.records import TrainingProgress

LINE_S = 60.0  # between two lines of progress
COLUMNS = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}")


def run_training(recipe: TrainingRecipe) -> None:
    """Train to the end, or until SIGINT or SIGTERM; then save, and exit with the status of interrupted commands.

    Raises OutriderError for a recipe that cannot work.
    """
    first = os.environ.get("RANK", "0") == "0"  # of the processes that train together
    with claimed(recipe.run) if first else nullcontext():
        _run(recipe, first=first)


def _run(recipe: TrainingRecipe, *, first: bool) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    with quiet():
        from outrider.training.distillation import Training

    screen = Console(stderr=True)
    lines = _ProgressLines(shown=first and not screen.is_terminal)
    with Progress(*COLUMNS, console=screen, transient=True, disable=not screen.is_terminal or not first) as progress:
        bar = progress.add_task("loading", total=1.0, figures="")

        def on_progress(what: str, done: float) -> None:
            progress.update(bar, description=what, completed=done)
            if done:  # before that a mistake in the recipe may be found
                lines.show(what, f"{done:.0%}")

        training = Training(recipe, on_progress)
        if first and training.skipped:
            print(f"outrider train: left out {training.skipped} texts that are not UTF-8", file=sys.stderr)
        if first and training.resumed:
            print(f"outrider train: goes on from step {training.progress.step}", file=sys.stderr)
        with _interruptible() as interrupted:
            for now in training.run():
                progress.update(bar, description=f"step {now.step}", completed=now.spent, figures=_figures(now))
                lines.show("training", f"step {now.step} · {now.spent:.0%} · {_figures(now)}")
                if training.any_process(interrupted.requested):
                    training.save()
                    break
    if not training.leads:
        return
    if now.spent < 1.0:
        print(
            f"outrider train: stopped at step {now.step}, saved in {recipe.run}; the same command goes on from there",
            file=sys.stderr,
        )
        raise SystemExit(INTERRUPTED)
    for category, length in (now.measured.by_category if now.measured else {}).items():
        print(f"outrider train: {category}: {length:.2f} tokens a step")
    if now.measured and now.measured.by_chain:
        lengths = " ".join(f"{length:.2f}" for length in now.measured.by_chain)
        print(f"outrider train: tokens a step with chains of 1, 2, ... drafts: {lengths}")
    if (gain := training.expected_gain()) is not None:
        print(f"outrider train: {gain}")
    print(last_line(recipe, now, gain), flush=True)


def last_line(recipe: TrainingRecipe, now: TrainingProgress, gain: ExpectedGain | None = None) -> str:
    """Return the line for scripts."""
    figures = {"steps": f"{now.step}", "tokens": f"{now.tokens}", "seconds": f"{now.seconds:.1f}"}
    if now.seconds:
        figures["tokens_per_s"] = f"{now.tokens / now.seconds:.0f}"
    figures |= _quality(now)
    if gain is not None:
        figures["expected_speedup"] = f"{gain.speedup:.2f}"
    line = " ".join(f"{name}={value}" for name, value in figures.items())
    return f"outrider train: wrote {recipe.output}: {line}"


def _quality(now: TrainingProgress) -> dict[str, str]:
    if now.measured is None:
        return {}
    lengths = {f"acceptance_t{at:g}": f"{length:.2f}" for at, length in now.measured.acceptance.items()}
    loss = {} if math.isnan(now.loss) else {"loss": f"{now.loss:.3f}"}  # there is none before the first step
    return {**loss, "held_out_loss": f"{now.measured.held_out_loss:.3f}", **lengths}


def _figures(now: TrainingProgress) -> str:
    figures = [f"{name} {value}" for name, value in _quality(now).items()]
    figures += [f"{now.tokens / max(now.seconds, 1e-9):,.0f} tokens/s", f"{now.left / 60:.0f} min left"]
    return " · ".join(figures)


class _ProgressLines:
    """Progress where standard error is no terminal: a line when something begins, and then one a minute."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._what = ""
        self._at = 0.0

    def show(self, what: str, how_far: str) -> None:
        """Print a line, if it is time for one."""
        now = time.monotonic()
        if self._shown and (what != self._what or now - self._at >= LINE_S):
            self._what, self._at = what, now
            print(f"outrider train: {what}, {how_far}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class _Interruption:
    requested: bool = False


@contextmanager
def _interruptible() -> Iterator[_Interruption]:
    """Record the first SIGINT or SIGTERM, so that the training ends after its step. A second signal acts as usual."""
    interruption = _Interruption()

    def record(_: int, __: FrameType | None) -> None:
        interruption.requested = True
        restore()

    before = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield interruption
    finally:
        restore()
