"""Speculation in rounds, in this process: draft a tree, verify it in one pass, commit, for several texts at once.

The simplest loop over the engine's own passes and the rule's own walk: what is measured of it is the engine, without a
network, a router, or drafting while a step runs, which is what the service does. Its trees are best first: each level
expands the few best new nodes, each into its best candidates as the device ranks them, and of all nodes those with the
best scores are verified. With no drafter it is plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from outrider.core.contract import Contract
from outrider.core.filters import FloatRow
from outrider.core.growth import CANDIDATES
from outrider.core.noise import Draw, generation_base
from outrider.core.rules import VERIFY, Rows, SeededChance
from outrider.core.rules.matching import SharedNoise
from outrider.core.sampler import Choice
from outrider.engine.batch import Segment
from outrider.engine.device import DeviceEngine
from outrider.engine.logits import Logits, Row, rows_of

CHUNK = 256  # tokens of a prompt in one pass
# s of softmax((log q + g) / s), fitted once to the reference pair; the service fits it as it goes.
SPREADS = {True: 1.0, False: 0.6}  # by whether greedy


class Growth(NamedTuple):
    """How a round's tree grows."""

    depth: int  # levels, each a pass of the drafter
    beam: int  # nodes of a text expanded in a level
    width: int  # candidates of a node
    nodes: int  # of a text that are verified


@dataclass(slots=True)
class Node:
    """A drafted token."""

    token: int
    depth: int  # 1 follows the root
    parent: int  # index among the tree's nodes; -1: the root
    score: float  # log of the chance that the text comes here
    row: int | None = None  # of the drafter's cache behind the text, where it was expanded


@dataclass(slots=True)
class Text:
    """One session."""

    slot: int
    tokens: list[int]
    contract: Contract
    verified: int = 0  # cache rows that the target has of it
    drafted: int = 0  # and the drafter
    choices: list[Choice] = field(default_factory=list)
    tree: list[Node] = field(default_factory=list)

    @property
    def draw(self) -> Draw:
        """How its tokens are drawn."""
        return Draw(generation_base(self.contract.seed, self.contract.choice), self.contract.temperature)


class Rounds:
    """A target, and what drafts for it."""

    def __init__(self, target: DeviceEngine, drafter: DeviceEngine | None = None, growth: Growth | None = None) -> None:
        self._target = target
        self._drafter = drafter
        self._growth = growth

    def read(self, texts: Sequence[Text]) -> None:
        """Reads the prompts, but for their last tokens."""
        for text in texts:
            for engine in filter(None, (self._target, self._drafter)):
                for start in range(0, len(text.tokens) - 1, CHUNK):
                    part = np.array(text.tokens[start : min(start + CHUNK, len(text.tokens) - 1)])
                    engine.forward([Segment(text.slot, start, part, start + np.arange(len(part)), None, 0)])
            text.verified = text.drafted = len(text.tokens) - 1

    def step(self, texts: Sequence[Text]) -> int:
        """One round. Returns how many tokens it committed."""
        for text in texts:
            text.tree = []
        if self._drafter is not None and self._growth is not None:
            self._draft(self._drafter, self._growth, texts)
        segments = [_verification(text) for text in texts]
        said = self._target.judge(segments, [text.draw for text in texts])
        first = committed = 0
        for text, segment in zip(texts, segments, strict=True):
            committed += self._commit(text, said, first)
            first += segment.outputs
        return committed

    def _draft(self, drafter: DeviceEngine, growth: Growth, texts: Sequence[Text]) -> None:
        """Grows a tree for each text and prunes it to the nodes that are to be verified."""
        expanded: list[list[int]] = [[-1] for _ in texts]  # nodes of the level, -1 the root
        used = [0] * len(texts)  # rows behind the text
        draws = [text.draw for text in texts]
        for level in range(growth.depth):
            segments = [
                _expansion(text, nodes, used[index]) if level else _pending(text)
                for index, (text, nodes) in enumerate(zip(texts, expanded, strict=True))
            ]
            said = drafter.judge(segments, draws, CANDIDATES)
            row = 0
            for index, text in enumerate(texts):
                if not level:
                    text.drafted = len(text.tokens)
                mine = rows_of(said, row, len(expanded[index]))
                row += len(mine)
                used[index] += len(mine) if level else 0
                expanded[index] = _grow(text, expanded[index], mine, growth)
        for text in texts:
            _prune(text, growth.nodes)

    def _commit(self, text: Text, said: Logits, first: int) -> int:
        parents = [node.parent + 1 for node in text.tree]
        rows = Rows([-1, *parents], [-1, *(node.token for node in text.tree)])
        walk = SharedNoise().walk(rows, _Judge(said, first), SeededChance(VERIFY))
        behind = text.verified + 1  # the root's own row is committed
        path = np.array(walk.path, np.int64)
        self._target.move(text.slot, behind + path - 1, behind + np.arange(len(path)))
        text.verified = behind + len(path)
        if self._drafter is not None:
            kept = [text.tree[row - 1].row for row in walk.path]
            known = kept[: kept.index(None)] if None in kept else kept
            source = len(text.tokens) + np.array(known, np.int64)
            self._drafter.move(text.slot, source, len(text.tokens) + np.arange(len(known)))
            text.drafted = len(text.tokens) + len(known)
        text.tokens += [choice.token for choice in walk.choices]
        text.choices += walk.choices
        return len(walk.choices)


class _Judge:
    """What the target says after the rows of one text; the rule asks for nothing else. See `outrider.core.rules`."""

    def __init__(self, said: Logits, first: int) -> None:
        self._said = said
        self._first = first

    def choose(self, row: int) -> Choice:
        choice = self._said.choice(self._first + row)
        assert choice is not None
        return choice

    def p(self, row: int) -> FloatRow:
        raise NotImplementedError

    def q(self, row: int) -> FloatRow:
        raise NotImplementedError

    def said(self, row: int, token: int) -> Choice:
        raise NotImplementedError


def _pending(text: Text) -> Segment:
    """What the drafter has not read yet; it drafts after the last token."""
    tokens = np.array(text.tokens[text.drafted :])
    return Segment(text.slot, text.drafted, tokens, text.drafted + np.arange(len(tokens)), None, 1)


def _expansion(text: Text, nodes: Sequence[int], used: int) -> Segment:
    """Some nodes of one level, behind `used` rows of those above."""
    mask = np.zeros((len(nodes), used + len(nodes)), np.bool_)
    for at, index in enumerate(nodes):
        node = text.tree[index]
        node.row = used + at
        while index >= 0:
            mask[at, text.tree[index].row] = True
            index = text.tree[index].parent
    tokens = np.array([text.tree[index].token for index in nodes])
    positions = np.array([len(text.tokens) - 1 + text.tree[index].depth for index in nodes])
    return Segment(text.slot, len(text.tokens), tokens, positions, mask)


def _grow(text: Text, expanded: Sequence[int], rows: Sequence[Row], growth: Growth) -> list[int]:
    """Adds the candidates of the expanded nodes; gives those to be expanded next."""
    before = len(text.tree)
    for index, row in zip(expanded, rows, strict=True):
        best = row.best
        assert best is not None
        score, depth = (text.tree[index].score, text.tree[index].depth) if index >= 0 else (0.0, 0)
        relative = (best.scores - best.scores[0]) / SPREADS[text.contract.greedy]
        edges = relative - np.log(np.exp(relative).sum())
        for token, edge in zip(best.tokens[: growth.width].tolist(), edges.tolist(), strict=False):
            text.tree.append(Node(token, depth + 1, index, score + edge))
    return sorted(range(before, len(text.tree)), key=lambda index: -text.tree[index].score)[: growth.beam]


def _prune(text: Text, most: int) -> None:
    """Leaves the best nodes; a node's score is never above its parent's, so none loses its parent."""
    best = sorted(range(len(text.tree)), key=lambda index: (-text.tree[index].score, index))[:most]
    places = {index: place for place, index in enumerate(sorted(best))} | {-1: -1}
    kept = [text.tree[index] for index in sorted(best)]
    for node in kept:
        node.parent = places[node.parent]
    text.tree = kept


def _verification(text: Text) -> Segment:
    """The root and the tree below it."""
    count = 1 + len(text.tree)
    mask = np.zeros((count, count), np.bool_)
    mask[0, 0] = True
    for row, node in enumerate(text.tree, 1):
        mask[row] = mask[node.parent + 1]
        mask[row, row] = True
    tokens = np.array([text.tokens[-1], *(node.token for node in text.tree)])
    positions = text.verified + np.array([0, *(node.depth for node in text.tree)])
    return Segment(text.slot, text.verified, tokens, positions, mask if count > 1 else None)
