"""Computes the expected number of a tree's nodes that a rule accepts, exactly over the rule's random decisions.

Each function does what `Rule.walk` of `outrider.core.acceptance` does, with probabilities instead of random draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.trees.paths import Path
from outrider.core.acceptance import VerifiedRows
from outrider.core.acceptance.rejection import remove_token, residual
from outrider.core.sampling.filters import FloatRow

NEGLIGIBLE = 1e-4  # nodes with a smaller probability of being reached are ignored

Row = Callable[[Path], FloatRow]  # the distribution after a path: [vocabulary], sum 1


class ExpectedTree(NamedTuple):
    """A tree to verify: row 0 is its root, parents before children, siblings in the order of their ranks."""

    paths: tuple[Path, ...]
    rows: VerifiedRows

    @classmethod
    def of(cls, paths: Sequence[Path]) -> ExpectedTree:
        """Return the tree of the root and these paths."""
        with_root = ((), *paths)
        at = {path: row for row, path in enumerate(with_root)}
        parents = [-1, *(at[path[:-1]] for path in with_root[1:])]
        return cls(with_root, VerifiedRows(parents, [-1, *(path[-1] for path in with_root[1:])]))


def followed(tree: ExpectedTree, choose: Callable[[Path], int]) -> float:
    """Shared noise: return how many of the target's tokens the tree contains as a path. `choose` gives them."""
    known = set(tree.paths)
    path: Path = ()
    while True:
        path = (*path, choose(path))
        if path not in known:
            return len(path) - 1.0


def matched(tree: ExpectedTree, p: Row) -> float:
    """Target match: a node is accepted with its path's probability."""

    def children(row: int, reach: float) -> list[float]:
        target = p(tree.paths[row])
        return [reach * float(target[tree.rows.tokens[child]]) for child in tree.rows.children[row]]

    return _below(tree, 0, 1.0, children)


def rejected(tree: ExpectedTree, p: Row, q: Row, lenience: float = 1.0) -> float:
    """Recursive rejection; for a chain, speculative sampling, with lenience the lenient one."""

    def children(row: int, reach: float) -> list[float]:
        left, draft = p(tree.paths[row]), q(tree.paths[row]).copy()
        reaches = []
        for child in tree.rows.children[row]:
            token = tree.rows.tokens[child]
            accepted = min(1.0, float(left[token]) / (lenience * float(draft[token])))
            reaches.append(reach * accepted)
            reach *= 1.0 - accepted
            if reach > NEGLIGIBLE:
                left = residual(left, lenience * draft)
                remove_token(draft, token)
        return reaches

    return _below(tree, 0, 1.0, children)


def traversed(tree: ExpectedTree, p: Row, q: Row) -> float:
    """Traversal verification; for a chain, block verification.

    Until a node is accepted the rule is deterministic, so one visit of every node gives the probability that it is the
    accepted one.
    """
    alive, expected = 1.0, 0.0

    def visit(row: int, depth: int, alpha: float) -> None:
        nonlocal alive, expected
        if alpha <= 0.0 or alive < NEGLIGIBLE:
            return
        children = tree.rows.children[row]
        if children:
            target, draft = p(tree.paths[row]), q(tree.paths[row]).copy()
        for child in children:
            token = tree.rows.tokens[child]
            visit(child, depth + 1, min(1.0, alpha * float(target[token]) / float(draft[token])))
            rest = (alpha * target - draft).clip(min=0.0)
            total = float(rest.sum())
            if total <= 0.0:
                alpha = float(alpha >= 1.0)
                break
            target, alpha = rest / total, total / (total + (1.0 - alpha))
            remove_token(draft, token)
        expected += alive * alpha * depth
        alive *= 1.0 - alpha

    visit(0, 0, 1.0)
    return expected


def _below(tree: ExpectedTree, row: int, reach: float, reaches: Callable[[int, float], list[float]]) -> float:
    """Return the sum of the acceptance probabilities of the nodes below `row`; `reaches` gives its children's."""
    children = tree.rows.children[row]
    if not children or reach < NEGLIGIBLE:
        return 0.0
    return sum(
        chance + _below(tree, child, chance, reaches)
        for child, chance in zip(children, reaches(row, reach), strict=True)
    )
