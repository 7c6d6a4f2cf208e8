"""The training task: the part of a training that depends on the kind of module that it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from outrider.training.acceptance import TargetTexts


class TrainingTask(Protocol):
    """The task for one kind of student, a torch module.

    If a training runs in several processes, `student` is the module that shares gradients between them, and `plain` is
    the module without this wrapper.
    """

    kind: str  # of the speculator, for its model card

    def loss(self, student: Any, plain: Any, step: int, windows: Any) -> Tensor:
        """Return the loss of a step, a mean. `windows`: a batch of its data, as `TrainingBatches` has them."""

    def write(self, plain: Any, source: Path, folder: Path) -> None:
        """Write the student into an empty folder, in the format that drafters load. `source`: has the tokenizer."""


class TextTask(TrainingTask, Protocol):
    """A task on windows of a text: ids [rows, length + 1]."""

    def held_out(self, plain: Any, window: Tensor) -> float:
        """Return the loss on a held-out window: ids [length + 1]."""

    def acceptance(self, plain: Any, texts: TargetTexts) -> float:
        """Return the acceptance length of the student's chains on the target's texts."""


class TrainingBatches(Protocol):
    """What a training learns from: an infinite sequence of batches."""

    def batch(self, number: int) -> Any:
        """Return a batch, which has a method `to` for its device."""

    def tokens(self, number: int) -> int:
        """Return the tokens that a batch reads."""
