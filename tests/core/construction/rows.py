"""Made-up drafts: candidates after any path."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.core.construction import Construction, TreeTerms, grow
from outrider.core.tree.node import Node
from outrider.core.tree.token_tree import TokenTree

Path = tuple[int, ...]


class Draft:
    """Chances over a small vocabulary after each path, fixed by a seed; notes in which passes it was asked."""

    def __init__(self, vocabulary: int, seed: int, spread: float = 1.5) -> None:
        self.vocabulary = vocabulary
        self.passes: list[list[Path]] = []
        self._seed = seed
        self._spread = spread

    def chances(self, path: Path) -> np.ndarray:
        """[vocabulary], sum 1."""
        weights = np.exp(np.random.default_rng([self._seed, *path]).normal(0, self._spread, self.vocabulary))
        return weights / weights.sum()

    def score(self, path: Path) -> float:
        """The product along a path."""
        return math.prod(float(self.chances(path[:end])[path[end]]) for end in range(len(path)))

    def grown(self, construction: Construction, terms: TreeTerms, tree: TokenTree | None = None) -> list[Path]:
        """The paths of what a step would verify."""
        tree = tree or TokenTree([1])

        def judge(nodes: Sequence[Node]) -> list[list[tuple[int, float]]]:
            paths = [tuple(tree.path(node)) for node in nodes]
            self.passes.append(paths)
            rows = [self.chances(path) for path in paths]
            return [[(int(token), math.log(row[token])) for token in np.argsort(-row, kind="stable")] for row in rows]

        nodes = grow(tree, construction, terms, judge)
        tree.check_integrity()
        return [tuple(tree.path(node)) for node in nodes]
