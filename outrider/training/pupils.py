"""Who learns, and what that is taught: all that a training does not know of what it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from outrider.training.acceptance import Said


class Lessons(Protocol):
    """Of one kind of pupil, a module. Where a training runs in several processes its loss is asked of the one that
    shares its gradients, and everything else of the plain one."""

    kind: str  # of speculator, for its card

    def loss(self, pupil: Any, plain: Any, step: int, windows: Tensor) -> Tensor:
        """What a step minimises, a mean. `windows`: ids [rows, length + 1]."""

    def held_out(self, plain: Any, window: Tensor) -> float:
        """A loss on a window of which nothing is learned: ids [length + 1]."""

    def acceptance(self, plain: Any, said: Said) -> float:
        """The acceptance length of its chains on what the target has said."""

    def write(self, plain: Any, source: Path, folder: Path) -> None:
        """Puts it into an empty folder, as those load it who draft with it. `source`: holds its target's tokenizer."""
