"""Drafting with heads, as a verifier sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

FloatRows = NDArray[np.float32]


class Root(NamedTuple):
    """Where a session is to be drafted for."""

    slot: int
    tokens: Sequence[int]  # committed; the features of all but the last one are kept


class Drafted(NamedTuple):
    """A node whose children are asked for."""

    parent: int  # the row that says it may follow
    token: int


class Speculator(Protocol):
    """Heads and what they hold of each slot. One call at a time.

    A round begins at the roots of some sessions and goes on level by level. Its rows are numbered as they are given:
    those of the roots first, in order. What a round has drafted is gone with the next.
    """

    depth: int  # levels at most
    at_once: bool  # `begin` has computed all levels
    sayable: int  # ids that it can draft are below

    def take(self, slot: int, source: int | None, rows: int) -> None:
        """A session begins in a slot, over the first `rows` rows that it or `source` holds."""

    def keep(self, slot: int, start: int, features: Tensor) -> None:
        """The true features of rows that were committed, from row `start` on: [rows, width * parts].

        A speculator whose features are of wanted rows alone is told of some rows, the last one among them.
        """

    def begin(self, roots: Sequence[Root]) -> list[FloatRows | None]:
        """Begins a round: for each root the logits of what follows, [vocabulary]; None while its text is being read."""

    def expand(self, nodes: Sequence[Drafted]) -> FloatRows:
        """What follows each of them: logits [nodes, vocabulary]."""
