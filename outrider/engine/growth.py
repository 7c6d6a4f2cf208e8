"""Trees that an engine grows by itself: several levels in one call, each from the tokens of those before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.engine.interface.logits import BestTokens

LEVEL_ROWS = 8  # at most this many rows per segment and level; further requested rows are ignored
CHILDREN = 8  # at most this many children of a row
MOST_LEVELS = 7  # levels that one call adds at most


@dataclass(frozen=True, slots=True)
class Growth:
    """How an engine grows the tree of a segment, whose rows that want logits are the first level.

    Each further level has the best nodes of the whole tree that were not run yet, by path score: that of the row before
    a node, times the node's share in the softmax over the candidates of that row.
    """

    base: int  # cache rows [0, base) of the slot are visible to all rows of the tree
    log_scores: NDArray[np.float64]  # [wanted] logarithms of the first level's path scores
    scale: float  # s in softmax(score / s)
    width: int  # best candidates of a row that may be run, at most `CHILDREN`
    log_floor: float  # logarithm of the path score below which no node is run
    last: int  # position behind which none is run


@dataclass(frozen=True, slots=True)
class GrownLevel:
    """A further level: `LEVEL_ROWS` rows of each segment that grew, in the cache rows behind those of the level before.

    Row r of level l is the number l * LEVEL_ROWS + r of its segment; level 0 has the rows that wanted logits.
    """

    parents: NDArray[np.int64]  # [grown, LEVEL_ROWS] numbers of the rows before them; -1: there is no node
    tokens: NDArray[np.int64]  # [grown, LEVEL_ROWS]
    best: BestTokens  # after each row: [grown, LEVEL_ROWS, best]; a score that is not finite is no candidate's

    def rows(self, tree: int) -> Iterator[tuple[int, int, BestTokens]]:
        """Yield the parent, the token and the candidates of each row of a tree."""
        parents, tokens = self.parents[tree].tolist(), self.tokens[tree].tolist()
        yield from zip(parents, tokens, map(BestTokens, self.best.tokens[tree], self.best.scores[tree]), strict=True)
