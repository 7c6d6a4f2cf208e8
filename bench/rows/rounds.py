"""Speculation in rounds, in this process: draft a tree, verify it in one pass, commit, for several texts at once.

This is the simplest loop over the engine's passes and the rule's walk. It measures the engine alone, without the
service's network, router, and drafting while a step runs. Its trees are best-first: each level expands the few best
nodes, each into its best candidates as the device ranks them, and the nodes with the best scores are verified. Where
the drafter's engine grows levels by itself, it does. Without a drafter it is plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from outrider.core.acceptance import VERIFY, SeededRandom, VerifiedRows
from outrider.core.acceptance.exact_match import SharedNoise
from outrider.core.construction.expansion import CANDIDATES
from outrider.core.sampling.filters import FloatRow
from outrider.core.sampling.noise import Draw, generation_base
from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import Contract
from outrider.engine.following import FollowingPass
from outrider.engine.gpu import DeviceEngine
from outrider.engine.gpu.tree_growth import MOST_TREES
from outrider.engine.growth import CHILDREN, LEVEL_ROWS, Growth
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.logits import BestTokens, Logits, LogitsRow, logits_rows
from outrider.engine.interface.masks import path_mask, tree_mask

CHUNK = 256  # tokens of a prompt in one pass
# s of softmax((log q + g) / s), fitted once to the reference pair; the service fits it while it runs.
SPREADS = {True: 1.0, False: 0.6}  # key: whether decoding is greedy


class RoundGrowth(NamedTuple):
    """The size of a round's tree."""

    depth: int  # levels, each a pass of the drafter
    beam: int  # nodes of a text that a level expands
    width: int  # candidates of a node
    nodes: int  # verified nodes of a text


@dataclass(slots=True)
class RoundNode:
    """A drafted token."""

    token: int
    depth: int  # 1 follows the root
    parent: int  # index among the tree's nodes; -1: the root
    score: float  # path score, as a logarithm
    row: int = -1  # row in the drafter's KV cache, counted after the text; -1: not expanded


@dataclass(slots=True)
class RoundText:
    """One session."""

    slot: int
    tokens: list[int]
    contract: Contract
    verified: int = 0  # rows in the target's KV cache
    drafted: int = 0  # rows in the drafter's KV cache
    choices: list[Choice] = field(default_factory=list)
    tree: list[RoundNode] = field(default_factory=list)

    @property
    def draw(self) -> Draw:
        """How the text's tokens are drawn."""
        return Draw(generation_base(self.contract.seed, self.contract.choice), self.contract.temperature)


class RoundRunner:
    """A target and its drafter, if it has one."""

    def __init__(
        self, target: DeviceEngine, drafter: DeviceEngine | None = None, growth: RoundGrowth | None = None
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._growth = growth

    def read(self, texts: Sequence[RoundText]) -> None:
        """Read the prompts, except their last tokens."""
        for text in texts:
            for engine in filter(None, (self._target, self._drafter)):
                for start in range(0, len(text.tokens) - 1, CHUNK):
                    part = np.array(text.tokens[start : min(start + CHUNK, len(text.tokens) - 1)])
                    engine.forward([Segment(text.slot, start, part, start + np.arange(len(part)), None, 0)])
            text.verified = text.drafted = len(text.tokens) - 1

    def step(self, texts: Sequence[RoundText]) -> int:
        """Run one round. Return the number of committed tokens."""
        for text in texts:
            text.tree = []
        if self._drafter is not None and self._growth is not None:
            self._draft(self._drafter, self._growth, texts)
        segments, draws = [_verification(text) for text in texts], [text.draw for text in texts]
        if self._drafter is None and self._target.begins_next_pass:
            output, _ = self._target.run_on(segments, draws, FollowingPass(lambda: True, [()] * len(texts)))
        else:
            output = self._target.sample(segments, draws)
        first = committed = 0
        for text, segment in zip(texts, segments, strict=True):
            committed += self._commit(text, output, first)
            first += segment.outputs
        return committed

    def _draft(self, drafter: DeviceEngine, growth: RoundGrowth, texts: Sequence[RoundText]) -> None:
        """Grow a tree for each text and prune it to the nodes to verify."""
        if drafter.grows_trees and growth.depth > 1 and len(texts) <= MOST_TREES:
            _grow_on_device(drafter, growth, texts)
        else:
            self._grow_by_levels(drafter, growth, texts)
        for text in texts:
            _prune(text, growth.nodes)

    def _grow_by_levels(self, drafter: DeviceEngine, growth: RoundGrowth, texts: Sequence[RoundText]) -> None:
        expanded: list[list[int]] = [[-1] for _ in texts]  # nodes of the level, -1 the root
        used = [0] * len(texts)  # rows in the KV cache after the text
        draws = [text.draw for text in texts]
        for level in range(growth.depth):
            segments = [
                _expansion(text, nodes, used[index]) if level else _pending(text)
                for index, (text, nodes) in enumerate(zip(texts, expanded, strict=True))
            ]
            output = drafter.sample(segments, draws, CANDIDATES)
            row = 0
            for index, text in enumerate(texts):
                if not level:
                    text.drafted = len(text.tokens)
                mine = logits_rows(output, row, len(expanded[index]))
                row += len(mine)
                used[index] += len(mine) if level else 0
                expanded[index] = _grow(text, expanded[index], mine, growth)

    def _commit(self, text: RoundText, output: Logits, first: int) -> int:
        parents = [node.parent + 1 for node in text.tree]
        rows = VerifiedRows([-1, *parents], [-1, *(node.token for node in text.tree)])
        walk = SharedNoise().walk(rows, _Judge(output, first), SeededRandom(VERIFY))
        behind = text.verified + 1  # the root's own row is committed
        path = np.array(walk.path, np.int64)
        if len(path):
            self._target.move(text.slot, behind + path - 1, behind + np.arange(len(path)))
        text.verified = behind + len(path)
        if self._drafter is not None:
            kept = [text.tree[row - 1].row for row in walk.path]
            known = kept[: kept.index(-1)] if -1 in kept else kept
            source = len(text.tokens) + np.array(known, np.int64)
            self._drafter.move(text.slot, source, len(text.tokens) + np.arange(len(known)))
            text.drafted = len(text.tokens) + len(known)
        text.tokens += [choice.token for choice in walk.choices]
        text.choices += walk.choices
        return len(walk.choices)


class _Judge:
    """The target's choices after each row of one text, for the acceptance rule."""

    def __init__(self, output: Logits, first: int) -> None:
        self._output = output
        self._first = first

    def choose(self, row: int) -> Choice:
        choice = self._output.choice(self._first + row)
        assert choice is not None
        return choice

    def p(self, row: int) -> FloatRow:
        raise NotImplementedError

    def q(self, row: int) -> FloatRow:
        raise NotImplementedError

    def choice_of(self, row: int, token: int) -> Choice:
        raise NotImplementedError


def _pending(text: RoundText) -> Segment:
    """Return the tokens that the drafter has not read yet; it drafts after the last one."""
    tokens = np.array(text.tokens[text.drafted :])
    return Segment(text.slot, text.drafted, tokens, text.drafted + np.arange(len(tokens)), None, 1)


def _with_ancestors(text: RoundText, index: int) -> Iterator[int]:
    """Yield a node's index, its parent's, and so on."""
    while index >= 0:
        yield index
        index = text.tree[index].parent


def _expansion(text: RoundText, nodes: Sequence[int], used: int) -> Segment:
    """Return some nodes of one level, after the `used` rows of the levels above."""
    for row, index in enumerate(nodes, used):
        text.tree[index].row = row
    paths = [[text.tree[above].row for above in _with_ancestors(text, index)] for index in nodes]
    mask = path_mask(paths, used + len(nodes))
    tokens = np.array([text.tree[index].token for index in nodes])
    positions = np.array([len(text.tokens) - 1 + text.tree[index].depth for index in nodes])
    return Segment(text.slot, len(text.tokens), tokens, positions, mask)


def _grow(text: RoundText, expanded: Sequence[int], rows: Sequence[LogitsRow], growth: RoundGrowth) -> list[int]:
    """Add the candidates of the expanded nodes to the tree. Return the nodes to expand next."""
    before = len(text.tree)
    for index, row in zip(expanded, rows, strict=True):
        assert row.best is not None
        _add_children(text, index, row.best, growth.width)
    return sorted(range(before, len(text.tree)), key=lambda index: -text.tree[index].score)[: growth.beam]


def _add_children(text: RoundText, index: int, best: BestTokens, width: int) -> None:
    score, depth = (text.tree[index].score, text.tree[index].depth) if index >= 0 else (0.0, 0)
    relative = (best.scores - best.scores[0]) / SPREADS[text.contract.greedy]
    edges = relative - np.log(np.exp(relative).sum())
    for token, edge in zip(best.tokens[:width].tolist(), edges.tolist(), strict=False):
        text.tree.append(RoundNode(token, depth + 1, index, score + edge))


def _grow_on_device(drafter: DeviceEngine, growth: RoundGrowth, texts: Sequence[RoundText]) -> None:
    """Grow a tree for each text in one call. Each level expands as many nodes as the device takes."""
    grows = [
        Growth(
            base=len(text.tokens),
            log_scores=np.zeros(1),
            scale=SPREADS[text.contract.greedy],
            width=min(growth.width, CHILDREN),
            log_floor=-math.inf,
            last=len(text.tokens) - 2 + growth.depth,
        )
        for text in texts
    ]
    output, levels = drafter.grow(
        [_pending(text) for text in texts], [text.draw for text in texts], grows, growth.depth - 1
    )
    for index, text in enumerate(texts):
        text.drafted = len(text.tokens)
        first = output.best(index)
        assert first is not None
        _add_children(text, -1, first, growth.width)
        numbered = [-1] * LEVEL_ROWS  # the tree's node of each row
        for level in levels:
            for parent, token, best in level.rows(index):
                above = numbered[parent]
                node = next((at for at, it in enumerate(text.tree) if (it.parent, it.token) == (above, token)), None)
                numbered.append(-1 if parent < 0 or node is None else node)
                if parent >= 0 and node is not None:
                    text.tree[node].row = len(numbered) - 1 - LEVEL_ROWS
                    _add_children(text, node, best, growth.width)


def _prune(text: RoundText, most: int) -> None:
    """Keep the best nodes. A node's score is never above its parent's, so no node loses its parent."""
    best = sorted(range(len(text.tree)), key=lambda index: (-text.tree[index].score, index))[:most]
    places = {index: place for place, index in enumerate(sorted(best))} | {-1: -1}
    kept = [text.tree[index] for index in sorted(best)]
    for node in kept:
        node.parent = places[node.parent]
    text.tree = kept


def _verification(text: RoundText) -> Segment:
    """Return the segment that verifies the root and the tree below it."""
    mask = tree_mask(1, [node.parent + 1 for node in text.tree]) if text.tree else None
    tokens = np.array([text.tokens[-1], *(node.token for node in text.tree)])
    positions = text.verified + np.array([0, *(node.depth for node in text.tree)])
    return Segment(text.slot, text.verified, tokens, positions, mask)
