"""A training's figures, a line of JSON for each measurement."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import CheckpointError

if TYPE_CHECKING:
    from outrider.training.distillation import Progress


class Records:
    """The file of a run. Lines of what will be done and measured again are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        """`step`: where the run goes on. Raises CheckpointError as `add` does."""
        self._path = path
        kept = [line for line in _lines(path) if json.loads(line)["step"] < step]
        self._write("w", "".join(f"{line}\n" for line in kept))

    def add(self, now: Progress) -> None:
        """Raises CheckpointError when the disk is full."""
        figures = {
            "step": now.step,
            "tokens": now.tokens,
            "seconds": round(now.seconds, 3),
            "loss": None if math.isnan(now.loss) else now.loss,
            "held_out_loss": now.measured and now.measured.held_out_loss,
            "acceptance": now.measured.by_name() if now.measured else {},
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
    """The whole ones: the last may have been broken off."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [line.rstrip("\n") for line in text.splitlines(keepends=True) if line.endswith("\n")]
