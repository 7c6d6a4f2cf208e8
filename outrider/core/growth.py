"""How a drafter grows a tree: which nodes to expand, which children to propose, and how much to believe itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from outrider.core.contract import Plan
from outrider.core.edges import edge_code, edge_from_code
from outrider.core.filters import FloatRow, best_of
from outrider.core.repeats import Hint, RepeatFit
from outrider.core.shapes import RankRates
from outrider.core.tree import Node, TokenTree

CANDIDATES = 64  # best tokens of a row that are looked at; the rest of the vocabulary counts as none
RANKS = 16  # of a row's candidates whose acceptance is measured
SCALES = (0.1, 0.15, 0.22, 0.33, 0.5, 0.75, 1.1, 1.6, 2.4)
LOWEST_SCORE = 0.003  # path scores below this are never worth a node
WORTH_TELLING = 0.25  # by how much the logarithm of a known node's score must have risen
MEMORY = 0.98  # weight of the past at each observation
LEARNING = 0.02  # how far the usual chances follow one row


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of one row, best first."""

    tokens: NDArray[np.int64]  # [c]
    scores: FloatRow  # [c] log q + g up to a constant, falling


def candidates(scores: FloatRow) -> Candidates:
    """The leading tokens of a row of log q + g [vocabulary]."""
    return Candidates(*best_of(scores, CANDIDATES))


class Fits:
    """What a drafter's guesses turned out to be worth, for one class of temperatures."""

    def __init__(self) -> None:
        self.scale = ScaleFit()
        self.repeats = RepeatFit()
        self.ranks = RankRates()
        self.judged = self.agreed = 0  # places, and those where the best candidate was the target's token
        self._usual: list[float] = []  # chance of the children of a node, best first

    def edges(self, row: Candidates, width: int, hint: Hint | None) -> list[tuple[int, float]]:
        """The best `width` candidates and the logarithm of each one's chance, as the wire can carry it. None of a row
        without candidates: what the model has ids for may all be forbidden."""
        if not row.tokens.size:
            return []
        relative = self._relative(row, hint)
        normalizer = math.log(float(np.exp(relative).sum()))
        best = range(width) if hint is None else np.argsort(-relative, kind="stable")[:width]
        found = [
            (int(row.tokens[index]), edge_from_code(edge_code(float(relative[index]) - normalizer)))
            for index in best
            if index < len(relative)
        ]
        for rank, (_, edge) in enumerate(found):
            if rank == len(self._usual):
                self._usual.append(math.exp(edge))
            self._usual[rank] += LEARNING * (math.exp(edge) - self._usual[rank])
        return found

    def judge(self, row: Candidates, tokens: Sequence[int], hint: Hint | None) -> list[float]:
        """The logarithm of the chance of each of these tokens, as the wire can carry it."""
        if not row.tokens.size:
            return [edge_from_code(edge_code(-math.inf))] * len(tokens)
        relative = self._relative(row, hint)
        normalizer = math.log(float(np.exp(relative).sum()))
        known = dict(zip(row.tokens.tolist(), relative.tolist(), strict=True))
        return [edge_from_code(edge_code(known.get(token, -math.inf) - normalizer)) for token in tokens]

    def gain(self, scores: Iterable[float], width: int, price: float) -> float:
        """Tokens that expanding nodes with these path scores is expected to bring, less what verifying them costs."""
        usual = self._usual[:width] or [1.0]
        return sum(max(0.0, score * chance - price) for score in scores for chance in usual)

    def observe(self, row: Candidates, token: int, hint: Hint | None) -> None:
        """The target said `token` after a node whose candidates were `row`. Of none, nothing is learned."""
        if not row.tokens.size:
            return
        if hint is not None and hint.token != row.tokens[0]:
            relative = np.exp(self._relative(row, hint))
            believed = float(relative[row.tokens == hint.token].sum() / relative.sum())
            self.repeats.correct(hint.length, hint.token == token, believed)
        self.scale.observe(row, token)
        self.judged += 1
        self.agreed += int(row.tokens[0] == token)
        rank = np.flatnonzero(row.tokens[:RANKS] == token)
        self.ranks.observe(min(RANKS, row.tokens.size), int(rank[0]) if rank.size else None)

    def _relative(self, row: Candidates, hint: Hint | None) -> FloatRow:
        """Logarithms of the candidates' chances, up to a constant: the best one's is 0."""
        relative = self.scale.relative(row)
        if hint is not None:
            relative[row.tokens == hint.token] += self.repeats.bonus(hint.length)
            relative -= relative.max()  # the bonus may be large, where a model is sure of what is wrong
        return relative


class ScaleFit:
    """Fits s of softmax((log q + g) / s), the chance that a candidate is the target's token.

    It is the posterior if target and draft logits differ by Gumbel noise of scale s. s is chosen on a grid by the
    exponentially weighted likelihood of what the target then said (DESIGN, section 2, "Scores").
    """

    def __init__(self, first: float = 0.75) -> None:
        self._likelihood = np.array([-abs(math.log(scale / first)) for scale in SCALES])
        self.scale = first

    def observe(self, row: Candidates, token: int) -> None:
        """The target said `token` after a node whose candidates were `row`."""
        hit = np.flatnonzero(row.tokens == token)
        if not hit.size:
            return
        relative = (row.scores - row.scores[0])[None, :] / np.array(SCALES)[:, None]
        chance = relative[:, hit[0]] - np.log(np.exp(relative).sum(axis=1))
        self._likelihood = MEMORY * self._likelihood + chance
        self.scale = SCALES[int(self._likelihood.argmax())]

    def relative(self, row: Candidates) -> FloatRow:
        """(log q + g) / s of the candidates, the best one's being 0: [c]."""
        scores: FloatRow = (row.scores - row.scores[0]) / self.scale
        return scores


def floor_score(price: float, *, ahead: bool = False) -> float:
    """Path score below which a node is not worth drafting.

    That is the price. Ahead, nodes are also drafted for the step after the running one: those worth the price below a
    node that is itself worth it, hence the price squared.
    """
    return max(price * price if ahead else price, LOWEST_SCORE)


def frontier(tree: TokenTree, plan: Plan, price: float, limit: int, *, ahead: bool = False) -> list[Node]:
    """The nodes to expand next: the root if it is not expanded, and the best unexpanded ones worth it.

    Best first by path score (OPT-Tree, arXiv 2406.17276), hence parents before children; at most `limit`. A node at
    the plan's depth is a leaf. Only nodes that one step can hold are expanded, unless `ahead`.
    """
    if plan.depth == 0:
        return []
    first = [] if tree.root.expanded else [tree.root]
    floor = floor_score(price, ahead=ahead)
    worth = takewhile(lambda found: found[0] >= floor, tree.best_first(depth=plan.depth - 1, width=plan.width))
    held = worth if ahead else islice(worth, plan.nodes)
    return first + list(islice((node for _, node in held if not node.expanded), max(0, limit - len(first))))


def propose(tree: TokenTree, node: Node, scored: Sequence[tuple[int, float]], floor: float) -> list[Node]:
    """Expands `node`: of its candidates with the logarithms of their chances, best first, adds those whose path score
    is at least `floor`.

    Returns those to be told: new to the upstream, or worth more than it was told. Children that were only guessed at,
    and turn out not to be worth it, go.
    """
    node.expanded = True
    least = math.log(floor) - (node.log_score - tree.root.log_score)
    told = []
    for token, edge in scored:
        if edge < least:
            break
        present = node.children.get(token)
        if present and present.judged:
            continue
        if present and not present.names:
            tree.rescore(present, edge)
        if not present or not present.names or edge > present.edge + WORTH_TELLING:
            told.append(tree.add(node, token, edge))
    for child in list(node.children.values()):
        if not child.names and not child.judged and child not in told:
            tree.remove(child)
    return told
