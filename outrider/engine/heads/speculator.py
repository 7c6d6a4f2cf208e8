"""The interface of heads that draft inside a verifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.noise import Draw
from outrider.engine.growth import GrownLevel, Growth
from outrider.engine.interface.logits import LogitsRow

if TYPE_CHECKING:
    from torch import Tensor

FloatRows = NDArray[np.float32]


class KeptFeatures(NamedTuple):
    """Rows of a pass that were committed, and so have true features."""

    slot: int
    start: int  # the text's row that is the first of them
    rows: Sequence[int]  # of the pass
    tokens: Sequence[int]  # of the text from `start` on, one more than rows


class HeadRoot(NamedTuple):
    """The root of a session's drafts."""

    slot: int
    tokens: Sequence[int]  # committed; the speculator has the features of all but the last one
    draw: Draw | None = None  # how candidates are drawn, for a speculator that `grows_trees`; None: it returns logits
    growth: Growth | None = None  # of levels below the root, whose base is the text; None: it does not grow


class HeadNodes(NamedTuple):
    """A node to expand."""

    parent: int  # the row whose logits proposed it
    token: int


class Speculator(Protocol):
    """Heads and their state of each slot. One call at a time.

    A round begins at the roots of some sessions and expands level by level. Its rows are numbered in the order in which
    they are returned: those of the roots, then of each grown level, `LEVEL_ROWS` of each tree, then of nodes. The next
    round drops the rows of the last one.
    """

    depth: int  # maximum of levels
    all_levels_at_once: bool  # whether `begin` computes all levels, so that `expand` only looks them up
    grows_trees: bool  # whether `begin` can grow levels by itself, and chooses candidates where it is given a draw
    unpadded_vocabulary: int  # the heads draft only ids below this one

    def open_slot(self, slot: int, source: int | None, rows: int) -> None:
        """Begin a session in a slot, over the first `rows` rows that the slot, or `source`, holds."""

    def add_features(self, hidden: Tensor, kept: Sequence[KeptFeatures]) -> None:
        """Store the true features of committed rows. `hidden`: of a pass, [rows, width * parts].

        A speculator whose features are those of wanted rows alone receives the last row of each text. A text that the
        target reads again has the same features again.
        """

    def begin(self, roots: Sequence[HeadRoot], levels: int = 0) -> tuple[list[LogitsRow | None], list[GrownLevel]]:
        """Begin a round. Return each root's next logits, None while its text is being read, and the levels that have
        grown below roots with a growth, at most `levels`.
        """

    def expand(self, nodes: Sequence[HeadNodes]) -> list[LogitsRow]:
        """Return the logits of the tokens that follow each node."""


class FollowingSpeculator(Speculator, Protocol):
    """Heads on a target's device, whose KV follows the target's: the engine of the target calls these."""

    def record(self) -> None:
        """Record passes of all numbers of rows."""

    def copy(self, source: int, target: int, rows: int) -> None:
        """Give a slot rows [0, rows) of another one."""

    def release(self, slot: int, rows: int) -> None:
        """Release a slot's rows from `rows` on."""
