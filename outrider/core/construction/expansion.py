"""How a drafter grows a tree: which nodes it expands, which children it proposes, and how it calibrates its scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from outrider.core.construction.self_repetition import Hint, RepeatFit
from outrider.core.sampling.filters import FloatRow, best_of
from outrider.core.session.contract import Plan
from outrider.core.stats import RECENT, Ema
from outrider.core.tree.node import Node
from outrider.core.tree.score_codec import edge_code, edge_from_code
from outrider.core.tree.static_trees import RankRates
from outrider.core.tree.token_tree import TokenTree

CANDIDATES = 64  # best tokens of a row that are considered; the rest of the vocabulary is ignored
RANKS = 16  # ranks among a row's candidates whose acceptance is measured
SCALES = (0.1, 0.15, 0.22, 0.33, 0.5, 0.75, 1.1, 1.6, 2.4)
LOWEST_SCORE = 0.003  # a path score below this is never worth a node
RESEND_THRESHOLD = 0.25  # rise of the logarithm of a sent node's edge score from which the node is sent again
EMA_WEIGHT = 0.02  # weight of one row in the average child probabilities


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of one row, best first."""

    tokens: NDArray[np.int64]  # [c]
    scores: FloatRow  # [c] log q + g up to a constant, falling


def candidates(scores: FloatRow) -> Candidates:
    """Return the best tokens of a row of log q + g [vocabulary]."""
    return Candidates(*best_of(scores, CANDIDATES))


class DrafterFits:
    """The calibration of a drafter's scores by the target's tokens, for one rule and temperature bucket."""

    def __init__(self) -> None:
        self.scale = ScaleFit()
        self.repeats = RepeatFit()
        self.ranks = RankRates()
        self.compared = self.agreed = 0  # positions, and those where the best candidate was the target's token
        self._child_means: list[Ema] = []  # average probability of a node's children, best first

    def edges(self, row: Candidates, width: int, hint: Hint | None) -> list[tuple[int, float]]:
        """Return the best `width` candidates and the logarithm of each one's probability, rounded as on the wire.

        The list is empty for a row without candidates: the contract may forbid all of the model's ids.
        """
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
            if rank == len(self._child_means):
                self._child_means.append(Ema(EMA_WEIGHT))
            self._child_means[rank].observe(math.exp(edge))
        return found

    def rescore(self, row: Candidates, tokens: Sequence[int], hint: Hint | None) -> list[float]:
        """Return the logarithm of the probability of each of `tokens`, rounded as on the wire: [tokens]."""
        if not row.tokens.size:
            return [edge_from_code(edge_code(-math.inf))] * len(tokens)
        relative = self._relative(row, hint)
        normalizer = math.log(float(np.exp(relative).sum()))
        known = dict(zip(row.tokens.tolist(), relative.tolist(), strict=True))
        return [edge_from_code(edge_code(known.get(token, -math.inf) - normalizer)) for token in tokens]

    def gain(self, scores: Iterable[float], width: int, min_path_score: float) -> float:
        """Return the tokens that expanding nodes with these path scores is expected to add, less `min_path_score`, the
        tokens that verifying a child costs, for each of their children."""
        means = [child.mean for child in self._child_means[:width]] or [1.0]
        return sum(max(0.0, score * chance - min_path_score) for score in scores for chance in means)

    def kept(self, width: int) -> float:
        """Return what share of a level's expected gain the next level has, on average: that of the best `width`
        children together."""
        return min(1.0, sum(child.mean for child in self._child_means[:width])) if self._child_means else 1.0

    def observe(self, row: Candidates, token: int, hint: Hint | None) -> None:
        """Learn that the target chose `token` after a node with the candidates `row`. Without candidates, do
        nothing."""
        if not row.tokens.size:
            return
        if hint is not None and hint.token != row.tokens[0]:
            relative = np.exp(self._relative(row, hint))
            predicted = float(relative[row.tokens == hint.token].sum() / relative.sum())
            self.repeats.correct(hint.length, hint.token == token, predicted)
        self.scale.observe(row, token)
        self.compared += 1
        self.agreed += int(row.tokens[0] == token)
        rank = np.flatnonzero(row.tokens[:RANKS] == token)
        self.ranks.observe(min(RANKS, row.tokens.size), int(rank[0]) if rank.size else None)

    def _relative(self, row: Candidates, hint: Hint | None) -> FloatRow:
        """Return the logarithms of the candidates' probabilities up to a constant; the best one's is 0: [c]."""
        relative = self.scale.relative(row)
        if hint is not None:
            relative[row.tokens == hint.token] += self.repeats.bonus(hint.length)
            relative -= relative.max()  # the bonus may be large where a model is confident and wrong
        return relative


class ScaleFit:
    """Fits the scale s in softmax((log q + g) / s), the probability that a candidate is the target's token.

    The softmax is the posterior if target and draft logits differ by Gumbel noise of scale s. s is the value of a grid
    with the largest exponentially weighted likelihood of the tokens that the target chose.
    """

    def __init__(self, first: float = 0.75) -> None:
        self._likelihood = np.array([-abs(math.log(scale / first)) for scale in SCALES])
        self.scale = first

    def observe(self, row: Candidates, token: int) -> None:
        """Learn that the target chose `token` after a node with the candidates `row`."""
        hit = np.flatnonzero(row.tokens == token)
        if not hit.size:
            return
        relative = (row.scores - row.scores[0])[None, :] / np.array(SCALES)[:, None]
        chance = relative[:, hit[0]] - np.log(np.exp(relative).sum(axis=1))
        self._likelihood = RECENT * self._likelihood + chance
        self.scale = SCALES[int(self._likelihood.argmax())]

    def relative(self, row: Candidates) -> FloatRow:
        """Return (log q + g) / s of the candidates, shifted so that the best one's is 0: [c]."""
        scores: FloatRow = (row.scores - row.scores[0]) / self.scale
        return scores


def floor_score(min_path_score: float, *, ahead: bool = False) -> float:
    """Return the path score below which a node is not worth drafting: `min_path_score`.

    With `ahead`, nodes are also drafted for the step after the running one. Such a node must be worth verifying below a
    node that is itself worth verifying, hence the square.
    """
    return max(min_path_score * min_path_score if ahead else min_path_score, LOWEST_SCORE)


def frontier(tree: TokenTree, plan: Plan, min_path_score: float, limit: int, *, ahead: bool = False) -> list[Node]:
    """Return the nodes to expand next: the root if it is not expanded, and the best unexpanded nodes worth drafting.

    The nodes stand best first by path score (OPT-Tree, arXiv 2406.17276), hence parents before children; there are at
    most `limit`. A node at the plan's depth is a leaf. Unless `ahead`, only nodes that fit one step are expanded.
    """
    if plan.depth == 0:
        return []
    first = [] if tree.root.expanded else [tree.root]
    floor = floor_score(min_path_score, ahead=ahead)
    worth = takewhile(lambda found: found[0] >= floor, tree.best_first(depth=plan.depth - 1, width=plan.width))
    held = worth if ahead else islice(worth, plan.nodes)
    return first + list(islice((node for _, node in held if not node.expanded), max(0, limit - len(first))))


def propose(tree: TokenTree, node: Node, scored: Sequence[tuple[int, float]], floor: float) -> list[Node]:
    """Expand `node`: add those of its candidates whose path score is at least `floor`.

    `scored` holds the candidates with the logarithms of their probabilities, best first. Return the nodes to send:
    those that the upstream does not have, or has with a much lower score. Children that no model had scored, and that
    turn out not to be worth drafting, are removed.
    """
    node.expanded = True
    min_edge = math.log(floor) - (node.log_score - tree.root.log_score)
    to_send = []
    for token, edge in scored:
        if edge < min_edge:
            break
        present = node.children.get(token)
        if present and present.rescored:
            continue
        if present and not present.names:
            tree.rescore(present, edge)
        if not present or not present.names or edge > present.edge + RESEND_THRESHOLD:
            to_send.append(tree.add(node, token, edge))
    for child in list(node.children.values()):
        if not child.names and not child.rescored and child not in to_send:
            tree.remove(child)
    return to_send
