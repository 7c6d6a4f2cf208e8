"""How many of a tree's nodes a rule is expected to accept: exact over what the rule leaves to chance.

Each is what `Rule.walk` of `outrider.core.rules` does, with probabilities carried along instead of drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.trees.paths import Path
from outrider.core.filters import FloatRow
from outrider.core.rules import Rows
from outrider.core.rules.rejection import uncovered, without

NEGLIGIBLE = 1e-4  # chance of getting somewhere below which it is not looked at

Row = Callable[[Path], FloatRow]  # the distribution after a path: [vocabulary], sum 1


class Tree(NamedTuple):
    """A tree to verify: row 0 is its root, parents before children, siblings in the order of their ranks."""

    paths: tuple[Path, ...]
    rows: Rows

    @classmethod
    def of(cls, paths: Sequence[Path]) -> Tree:
        """The tree of these paths and the root."""
        whole = ((), *paths)
        at = {path: row for row, path in enumerate(whole)}
        parents = [-1, *(at[path[:-1]] for path in whole[1:])]
        return cls(whole, Rows(parents, [-1, *(path[-1] for path in whole[1:])]))


def followed(tree: Tree, choose: Callable[[Path], int]) -> float:
    """Shared noise: the target's own tokens, as far as the tree has them."""
    known = set(tree.paths)
    path: Path = ()
    while True:
        path = (*path, choose(path))
        if path not in known:
            return len(path) - 1.0


def matched(tree: Tree, p: Row) -> float:
    """Target match: a node is accepted with its path's probability."""

    def children(row: int, reach: float) -> list[float]:
        target = p(tree.paths[row])
        return [reach * float(target[tree.rows.tokens[child]]) for child in tree.rows.children[row]]

    return _below(tree, 0, 1.0, children)


def rejected(tree: Tree, p: Row, q: Row, lenience: float = 1.0) -> float:
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
                left = uncovered(left, lenience * draft)
                without(draft, token)
        return reaches

    return _below(tree, 0, 1.0, children)


def traversed(tree: Tree, p: Row, q: Row) -> float:
    """Traversal verification; for a chain, block verification. Until a node is accepted all is determined, so one visit
    of every node tells with which probability each is the one."""
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
            without(draft, token)
        expected += alive * alpha * depth
        alive *= 1.0 - alpha

    visit(0, 0, 1.0)
    return expected


def _below(tree: Tree, row: int, reach: float, reaches: Callable[[int, float], list[float]]) -> float:
    """The sum over the nodes below `row` of the chance that they are accepted; `reaches` gives its children's."""
    children = tree.rows.children[row]
    if not children or reach < NEGLIGIBLE:
        return 0.0
    return sum(
        chance + _below(tree, child, chance, reaches)
        for child, chance in zip(children, reaches(row, reach), strict=True)
    )
