"""The records of a training: a line of JSON for each measurement."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import CheckpointError
from outrider.training.evaluation import Evaluation


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The state of a training between two steps."""

    step: int
    tokens: int
    seconds: float
    spent: float  # share of the budget, 0 to 1
    left: float  # remaining seconds, at the speed so far
    loss: float  # mean over the steps before the last measurement and after the one before it
    measured: Evaluation | None  # the last measurement


class TrainingRecords:
    """The records of a run. Lines of steps that will be repeated are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        """`step`: at which the run continues. Raises CheckpointError when the disk is full."""
        self._path = path
        kept = [line for line in _lines(path) if json.loads(line)["step"] < step]
        self._write("w", "".join(f"{line}\n" for line in kept))

    def add(self, now: TrainingProgress) -> None:
        """Append a line. Raises CheckpointError when the disk is full."""
        figures = {
            "step": now.step,
            "tokens": now.tokens,
            "seconds": round(now.seconds, 3),
            "loss": None if math.isnan(now.loss) else now.loss,
            "held_out_loss": now.measured and now.measured.held_out_loss,
            "acceptance": now.measured.by_name() if now.measured else {},
            "by_category": now.measured and {name: round(it, 4) for name, it in now.measured.by_category.items()},
            "tokens_per_s": round(now.tokens / now.seconds, 1) if now.seconds else None,
        }
        self._write("a", json.dumps(figures) + "\n")

    def _write(self, mode: str, text: str) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: cannot be written: {error.strerror}; make room there, and run the same command again"
            ) from None


def _lines(path: Path) -> list[str]:
    """Return the complete lines; a crash may have cut off the last one."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [line.rstrip("\n") for line in text.splitlines(keepends=True) if line.endswith("\n")]
