"""The interface of heads that draft inside a verifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

FloatRows = NDArray[np.float32]


class HeadRoot(NamedTuple):
    """The root of a session's drafts."""

    slot: int
    tokens: Sequence[int]  # committed; the speculator has the features of all but the last one


class HeadNodes(NamedTuple):
    """A node to expand."""

    parent: int  # the row whose logits proposed it
    token: int


class Speculator(Protocol):
    """Heads and their state of each slot. One call at a time.

    A round begins at the roots of some sessions and expands level by level. Its rows are numbered in the order in which
    they are returned, those of the roots first. The next round drops the rows of the last one.
    """

    depth: int  # maximum of levels
    all_levels_at_once: bool  # whether `begin` computes all levels, so that `expand` only looks them up
    unpadded_vocabulary: int  # the heads draft only ids below this one

    def open_slot(self, slot: int, source: int | None, rows: int) -> None:
        """Begin a session in a slot, over the first `rows` rows that the slot, or `source`, holds."""

    def add_features(self, slot: int, start: int, features: Tensor) -> None:
        """Store the true features of committed rows, from row `start` on: [rows, width * parts].

        A speculator whose features are those of wanted rows alone receives some rows, the last one among them. A text
        that the target reads again has the same features again.
        """

    def begin(self, roots: Sequence[HeadRoot]) -> list[FloatRows | None]:
        """Begin a round and return each root's next logits, [vocabulary], or None while its text is being read."""

    def expand(self, nodes: Sequence[HeadNodes]) -> FloatRows:
        """Return the logits of the tokens that follow each node: [nodes, vocabulary]."""
