"""Proof by enumeration: every way in which chance can go, with its probability."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from outrider.core.acceptance import RandomSource, Rule, SparseRow, VerifiedRows
from outrider.core.sampling.filters import FloatRow
from outrider.core.sampling.sampler import Choice, Sampler
from outrider.core.session.contract import Contract
from outrider.core.tree.static_trees import Shape

Path = tuple[int, ...]
ResultT = TypeVar("ResultT")


@dataclass
class Tape(RandomSource):
    """Takes the ways that a script lists, then the first that is possible; records how many ways were possible."""

    script: list[int]
    taken: list[int] = field(default_factory=list)
    open: list[int] = field(default_factory=list)  # for each decision, how many ways were possible
    probability: float = 1.0

    def happens(self, probability: float) -> bool:
        assert -1e-12 < probability < 1 + 1e-12
        return bool(self.pick(np.array([1 - probability, probability]).clip(0, 1)))

    def pick(self, weights: FloatRow) -> int:
        possible = np.flatnonzero(weights)
        way = self.script[len(self.taken)] if len(self.taken) < len(self.script) else 0
        self.taken.append(way)
        self.open.append(len(possible))
        self.probability *= float(weights[possible[way]] / weights.sum())
        return int(possible[way])


def outcomes(run: Callable[[RandomSource], ResultT]) -> Iterator[tuple[float, ResultT]]:
    """All that a run can lead to."""
    script: list[int] = []
    while True:
        tape = Tape(script)
        result = run(tape)
        yield tape.probability, result
        script, ways = tape.taken, tape.open
        while script and script[-1] + 1 == ways[-1]:
            script.pop()
            ways.pop()
        if not script:
            return
        script[-1] += 1


class Language:
    """A target and a draft over a tiny vocabulary: any logits after any prefix, under a contract's filters."""

    def __init__(self, vocabulary: int, contract: Contract, *, seed: int = 0, spread: float = 1.5) -> None:
        self.vocabulary = vocabulary
        self._contract = contract
        self._seed = seed
        self._spread = spread
        self._p: dict[Path, FloatRow] = {}
        self._q: dict[Path, SparseRow] = {}

    def p(self, path: Path) -> FloatRow:
        if path not in self._p:
            self._p[path] = self._row(path, 0)
        return self._p[path]

    def q(self, path: Path) -> SparseRow:
        if path not in self._q:
            self._q[path] = SparseRow.of(self._row(path, 1))
        return self._q[path]

    def law(self, length: int) -> dict[Path, float]:
        """How the target itself continues."""
        joint: dict[Path, float] = {}
        for path in itertools.product(range(self.vocabulary), repeat=length):
            joint[path] = self.probability(path)
        return joint

    def probability(self, path: Path, after: int = 0) -> float:
        chance = 1.0
        for position in range(after, len(path)):
            chance *= float(self.p(path[:position])[path[position]])
        return chance

    def _row(self, path: Path, model: int) -> FloatRow:
        prompt = [0, 1]
        generator = np.random.default_rng([self._seed, model, *path])
        logits = generator.normal(0, self._spread, self.vocabulary).astype(np.float32)
        return Sampler(self._contract, self.vocabulary, prompt, 2).probabilities(logits, path)


@dataclass
class Tree:
    """What was drawn: row 0 is the root."""

    paths: list[Path]
    parents: list[int]

    @property
    def rows(self) -> VerifiedRows:
        return VerifiedRows(self.parents, [path[-1] if path else -1 for path in self.paths])


class JudgeOf:
    """Asks the language."""

    def __init__(self, language: Language, tree: Tree) -> None:
        self._language = language
        self._paths = tree.paths

    def choose(self, row: int) -> Choice:
        raise AssertionError("there is no shared noise here")

    def p(self, row: int) -> FloatRow:
        return self._language.p(self._paths[row])

    def q(self, row: int) -> FloatRow:
        return self._language.q(self._paths[row]).dense(self._language.vocabulary)

    def choice_of(self, row: int, token: int) -> Choice:
        return Choice(token, float("nan"))


def drawn(language: Language, shape: Shape, chance: RandomSource) -> Tree:
    """A tree of that shape, children drawn without replacement; a node has fewer where its q has no more."""
    tree = Tree([()], [-1])
    level: list[tuple[int, Shape]] = [(0, shape)]
    while level:
        below = []
        for row, children in level:
            tokens = language.q(tree.paths[row]).draw(len(children), chance)
            for token, grandchildren in zip(tokens, children, strict=False):
                tree.paths.append((*tree.paths[row], token))
                tree.parents.append(row)
                below.append((len(tree.paths) - 1, grandchildren))
        level = below
    return tree


def law_of(
    rule: Rule,
    language: Language,
    length: int,
    draw: Callable[[RandomSource], Tree],
    *,
    judge: Callable[[Language, Tree], JudgeOf] = JudgeOf,
) -> dict[Path, float]:
    """How a text continues whose first step is `rule` over a tree that was drawn, and which then goes on plainly."""

    def run(chance: RandomSource) -> Path:
        tree = draw(chance)
        walked = rule.walk(tree.rows, judge(language, tree), chance)
        committed = tuple(choice.token for choice in walked.choices)
        assert [tree.paths[row] for row in walked.path] == [committed[:end] for end in range(1, len(walked.path) + 1)]
        assert len(committed) == len(walked.path) + 1
        return committed

    joint = dict.fromkeys(itertools.product(range(language.vocabulary), repeat=length), 0.0)
    for probability, committed in outcomes(run):
        for rest in itertools.product(range(language.vocabulary), repeat=max(0, length - len(committed))):
            whole = (*committed, *rest)
            joint[whole[:length]] += probability * language.probability(whole[:length], len(committed))
    return joint


def distance(one: dict[Path, float], other: dict[Path, float]) -> float:
    """Total variation."""
    return sum(abs(one[path] - other[path]) for path in one) / 2


def shapes(width: int, depth: int, nodes: int) -> list[Shape]:
    """Every shape of at most `nodes` nodes."""

    def of(depth: int, nodes: int) -> Iterator[tuple[Shape, int]]:
        yield (), 0
        if not depth:
            return

        def siblings(count: int, nodes: int) -> Iterator[tuple[Shape, int]]:
            if not count:
                yield (), 0
                return
            for first, size in of(depth - 1, nodes - 1):
                for others, more in siblings(count - 1, nodes - 1 - size):
                    yield (first, *others), 1 + size + more

        for count in range(1, width + 1):
            if count <= nodes:
                yield from siblings(count, nodes)

    return sorted({shape for shape, size in of(depth, nodes) if size <= nodes}, key=repr)


def cut(shape: Shape, levels: int) -> Shape:
    """What has been streamed of it when `levels` levels have."""
    return tuple(cut(child, levels - 1) for child in shape) if levels else ()
