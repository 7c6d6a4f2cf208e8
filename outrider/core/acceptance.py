"""Acceptance under shared noise: the target's own token at every node of a path, and how far the tree holds it.

DESIGN: a node is accepted if and only if it is the target's token, so the commit is the target's own text for
any tree, drafter and pruning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from outrider.core.sampler import Choice


class Walk(NamedTuple):
    """What one verified tree commits."""

    path: list[int]  # rows of the accepted nodes, from the root's child down
    choices: list[Choice]  # the committed tokens: one for each accepted node, and the bonus


def walk(parents: Sequence[int], tokens: Sequence[int], choose_at: Callable[[int], Choice]) -> Walk:
    """Follows the target's own tokens down the tree whose rows were verified.

    parents[i] is the row that row i follows, row 0 being the root; tokens[i] its token. `choose_at(row)` is the
    target's choice after that row; it is asked for the path's rows alone, which is what makes a large tree
    as cheap to walk as its accepted path.
    """
    children: dict[tuple[int, int], int] = {(parents[row], tokens[row]): row for row in range(len(parents) - 1, 0, -1)}
    path: list[int] = []
    choices = [choose_at(0)]
    while (row := children.get((path[-1] if path else 0, choices[-1].token))) is not None:
        path.append(row)
        choices.append(choose_at(row))
    return Walk(path, choices)
