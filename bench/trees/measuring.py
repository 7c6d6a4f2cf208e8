"""Acceptance lengths at roots along a target's own text: the same roots, rows and draws for every cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench.trees.cells import DEPTH, LENIENCE, OURS, Cell, Setting, contract_of, drawn_of, taken
from bench.trees.drafts import WIDTH, LookupScores, ModelScores, NoisedScores, Scores, SourceScores, hints_of
from bench.trees.expecting import NEGLIGIBLE, Tree, followed, matched, rejected, traversed
from bench.trees.lessons import (
    Learned,
    Text,
    best_of,
    learn_heads,
    learn_lookup,
    learn_model,
    learn_suffixes,
    whole_row,
)
from bench.trees.paths import Path, PathRows, Rows, continued
from outrider.core.construction import CONSTRUCTIONS, Terms, construction_of, grow, shaped_of
from outrider.core.contract import RULES, SHARED_NOISE, Plan
from outrider.core.digest import EMPTY, extend
from outrider.core.filters import FloatRow
from outrider.core.rules import DRAFT, Drawn, SeededChance, SparseRow, rule_of
from outrider.core.sampler import Choice, Sampler
from outrider.core.shapes import Shape
from outrider.core.suffixes import FinishedOutputs
from outrider.core.tree import Node, TokenTree

LEVEL = 8  # nodes that a pass expands, the drafter's default; EAGLE-2's k
ARITY = 2  # of the k-ary tree
SEED = 2024

Figures = dict[Cell, float]  # acceptance lengths


@dataclass(slots=True)
class Lessons:
    """What all drafters learned from the texts of other prompts than those measured."""

    of: dict[tuple[str, float, bool], Learned] = field(default_factory=dict)  # by drafter, T, whether noise is shared
    outputs: dict[float, FinishedOutputs] = field(default_factory=dict)


def teach(setting: Setting, models: Mapping[str, Rows], prompts: Sequence[Sequence[int]]) -> Lessons:
    """Lets the drafters learn from the target's texts after some prompts."""
    lessons, target = Lessons(), models["target"]
    assert isinstance(target, PathRows)
    for heat in setting.temperatures:
        texts = [text_of(target, prompt, heat, SEED + at, setting.taught) for at, prompt in enumerate(prompts)]
        contracts = [contract_of(SHARED_NOISE, heat, SEED + at) for at in range(len(texts))]
        for name in setting.drafters:
            rows = models.get(name)
            if isinstance(rows, PathRows):
                for shared in (True, False):
                    learned = Learned()
                    for text, contract in zip(texts, contracts, strict=True):
                        learn_model(learned, rows, target, text, contract, shared=shared)
                    lessons.of[name, heat, shared] = learned
            elif rows is not None:
                lessons.of[name, heat, True] = learned = Learned()
                for text, contract in zip(texts, contracts, strict=True):
                    learn_heads(learned, rows, text, contract)
            elif name == "prompt lookup":
                lessons.of[name, heat, True] = learn_lookup(texts, contracts)
            else:
                lessons.of[name, heat, True], lessons.outputs[heat] = learn_suffixes(texts, contracts)
    return lessons


def text_of(target: Rows, prompt: Sequence[int], heat: float, seed: int, count: int) -> Text:
    """What the target says after a prompt."""
    return Text(tuple(continued(target, prompt, contract_of(SHARED_NOISE, heat, seed), count)), len(prompt))


def measure(
    setting: Setting, models: Mapping[str, Rows], lessons: Lessons, prompt: Sequence[int], number: int
) -> Figures:
    """The mean acceptance length of every cell over the roots of one prompt's texts. `number` makes its seeds."""
    totals: defaultdict[Cell, float] = defaultdict(float)
    target = models["target"]
    seed = SEED + 1000 + number
    for heat in setting.temperatures:
        text = text_of(target, prompt, heat, seed, (setting.roots - 1) * setting.stride)
        for name in ("target", *(name for name in setting.drafters if name in models)):
            models[name].read(text.tokens)
        for place in range(len(text.tokens) - 1, len(prompt) - 2, -setting.stride):
            for rows in models.values():
                rows.root(place)
            root = Root(setting, models, lessons, text, place, heat, seed)
            for name in setting.drafters:
                for cell, length in root.figures(name).items():
                    totals[cell] += length / setting.roots
    return dict(totals)


class Root:
    """One place in a text, at one temperature."""

    def __init__(
        self,
        setting: Setting,
        models: Mapping[str, Rows],
        lessons: Lessons,
        text: Text,
        place: int,
        heat: float,
        seed: int,
    ) -> None:
        self._setting = setting
        self._models = models
        self._target = models["target"]
        self._lessons = lessons
        self._text = text.tokens[: place + 1]
        self._heat = heat
        self._seed = seed
        self._draws = {  # greedy, nothing is left to chance
            Drawn.FREELY: range(setting.noises if heat else 1),
            Drawn.RANKED: range(1),
            Drawn.SAMPLED: range(setting.drafts if heat else 1),
        }
        self._samplers = [
            Sampler(contract_of(SHARED_NOISE, heat, seed, draw), self._target.vocabulary, self._text, text.prompt)
            for draw in self._draws[Drawn.FREELY]
        ]
        self._hints = hints_of(self._text, DEPTH)
        self._known: dict[tuple[str, bool, int], Scores] = {}
        self._q: dict[tuple[str, Path], tuple[SparseRow, FloatRow]] = {}
        self._p: dict[Path, FloatRow] = {}
        self._said: dict[tuple[int, Path], int] = {}

    def figures(self, drafter: str) -> Figures:
        """The acceptance length of each of a drafter's cells: 1 + accepted."""
        found: Figures = {}
        for kind, rules in _rules().items():
            for construction in CONSTRUCTIONS:
                fitting = [rule for rule in rules if self._wanted(rule, construction, drafter)]
                if fitting:
                    self._fill(found, drafter, kind, construction, fitting)
        return found

    def _wanted(self, rule: str, construction: str, drafter: str) -> bool:
        return taken(rule, construction, drafter) and (not self._setting.ours_alone or (rule, construction) == OURS)

    def _fill(self, found: Figures, drafter: str, kind: Drawn, construction: str, rules: Sequence[str]) -> None:
        budgets = self._setting.budgets
        draws = self._draws[kind]
        trees = {
            (budget, draw): self._tree(drafter, kind, construction, budget, draw)
            for budget in sorted(budgets, reverse=True)  # the largest first: its passes serve the others
            for draw in draws
        }
        if kind is not Drawn.FREELY:
            self._foresee([tree for tree, _ in trees.values()], whole=kind is Drawn.SAMPLED)
        for (budget, draw), (tree, q) in trees.items():
            for rule in rules:
                cell = Cell(drafter, self._heat, rule, construction, budget)
                accepted = self._accepted(rule, tree, q, draw)
                found[cell] = found.get(cell, 1.0) + accepted / len(draws)

    def _accepted(self, rule: str, tree: Tree, q: Mapping[Path, FloatRow], draw: int) -> float:
        """What a rule accepts of a tree, in expectation."""
        match rule:
            case "shared-noise":
                return followed(tree, partial(self._say, draw))
            case "target-match":
                return matched(tree, self._row)
            case "typical-acceptance":
                walk = rule_of(contract_of(rule, self._heat, 0)).walk(
                    tree.rows, _Typical(self._row, tree), SeededChance(0)
                )
                return float(len(walk.path))
            case "traversal-verification" | "block-verification":
                return traversed(tree, self._row, q.__getitem__)
            case _:
                lenience = LENIENCE if rule.startswith("lenient") else 1.0
                return rejected(tree, self._row, q.__getitem__, lenience)

    def _tree(
        self, drafter: str, kind: Drawn, construction: str, budget: int, draw: int
    ) -> tuple[Tree, Mapping[Path, FloatRow]]:
        """A drafter's tree, and for what was drawn the q of each node with children."""
        width = ARITY if construction == "k-ary" else WIDTH
        plan = Plan(depth=DEPTH, width=width, nodes=budget)
        shared = kind is Drawn.FREELY or drafter not in self._models
        learned = self._lessons.of[drafter, self._heat, shared]
        ranks = learned.drawn if kind is Drawn.SAMPLED else learned.ranks
        if kind is Drawn.FREELY and self._heat and drafter not in self._models:
            ranks = learned.noised_ranks
        rates = ranks.rates()
        shaped = shaped_of(construction)
        terms = Terms(plan, 2**31 if shaped.name == construction else LEVEL, rates=rates)
        if kind is Drawn.SAMPLED:
            return self._drawn(drafter, shaped.shape(terms), draw)
        tree = TokenTree(self._text)
        scores = self._scores(drafter, kind, draw, learned)

        def judge(nodes: Sequence[Node]) -> Sequence[Sequence[tuple[int, float]]]:
            return scores.after([tuple(tree.path(node)) for node in nodes])

        nodes = grow(tree, construction_of(construction), terms, judge)
        return Tree.of([tuple(tree.path(node)) for node in nodes]), {}

    def _scores(self, drafter: str, kind: Drawn, draw: int, learned: Learned) -> Scores:
        """What the drafter says at this root, the same for all constructions and budgets."""
        shared = kind is Drawn.FREELY and self._heat > 0.0
        key = drafter, shared, draw if shared else 0
        if key not in self._known:
            sampler = self._samplers[key[2]]
            if drafter in self._models:
                self._known[key] = ModelScores(
                    self._models[drafter],
                    sampler,
                    learned,
                    {} if learned.below else self._hints,
                    shared=kind is Drawn.FREELY,
                )
            elif shared:
                source = self._scores(drafter, Drawn.RANKED, 0, learned)
                self._known[key] = NoisedScores(source, self._text, sampler.contract, learned)
            elif drafter == "prompt lookup":
                self._known[key] = LookupScores(self._text, learned, DEPTH)
            else:
                both = best_of(self._text, self._lessons.outputs[self._heat])
                self._known[key] = SourceScores(both, self._text, learned)
        return self._known[key]

    def _drawn(self, drafter: str, shape: Shape, draw: int) -> tuple[Tree, Mapping[Path, FloatRow]]:
        """A tree of that shape. A smaller one's draws are the first of a larger one's."""
        paths: list[Path] = []
        q: dict[Path, FloatRow] = {}
        level: list[tuple[Path, Shape]] = [((), shape)]
        while level:
            level = [(path, below) for path, below in level if below]
            self._models[drafter].fetch(path for path, _ in level)
            children: list[tuple[Path, Shape]] = []
            for path, below in level:
                row, q[path] = self._draft_row(drafter, path)
                chance = SeededChance(self._seed, draw, extend(EMPTY, (len(self._text), *path)), DRAFT)
                drawn = row.draw(len(below), chance)
                children += [((*path, token), under) for token, under in zip(drawn, below, strict=False)]
            paths += [path for path, _ in children]
            level = children
        return Tree.of(paths), q

    def _draft_row(self, drafter: str, path: Path) -> tuple[SparseRow, FloatRow]:
        if (drafter, path) not in self._q:
            row = whole_row(self._samplers[0].probabilities(self._models[drafter].after(path), path))
            self._q[drafter, path] = row, row.dense(self._target.vocabulary)
        return self._q[drafter, path]

    def _foresee(self, trees: Iterable[Tree], *, whole: bool) -> None:
        """Computes the target's rows that will be asked for: a level a pass, of the nodes that are reached at all, or
        in one pass the whole trees."""
        parents = {tree.paths[row] for tree in trees for row, below in enumerate(tree.rows.children) if below}
        if whole:
            self._target.fetch(parents)
            return
        reach: dict[Path, float] = {(): 1.0}
        while reach := {path: chance for path, chance in reach.items() if path in parents and chance >= NEGLIGIBLE}:
            self._target.fetch(reach)
            reach = {
                path: reach[path[:-1]] * float(self._row(path[:-1])[path[-1]])
                for path in parents
                if path and path[:-1] in reach
            }

    def _row(self, path: Path) -> FloatRow:
        """The target's distribution after a path."""
        if path not in self._p:
            self._p[path] = self._samplers[0].probabilities(self._target.after(path), path)
        return self._p[path]

    def _say(self, draw: int, path: Path) -> int:
        """The target's token after a path under one draw of the noise."""
        if (draw, path) not in self._said:
            self._said[draw, path] = self._samplers[draw].choose(self._target.after(path), path).token
        return self._said[draw, path]


def _rules() -> dict[Drawn, list[str]]:
    """The rules by how they want their trees."""
    rules: dict[Drawn, list[str]] = {kind: [] for kind in Drawn}
    for rule in RULES:
        rules[drawn_of(rule)].append(rule)
    return rules


class _Typical:
    """What typical acceptance asks for."""

    def __init__(self, row: Callable[[Path], FloatRow], tree: Tree) -> None:
        self._row = row
        self._tree = tree

    def choose(self, row: int) -> Choice:
        raise AssertionError("there is no shared noise here")

    def p(self, row: int) -> FloatRow:
        return self._row(self._tree.paths[row])

    def q(self, row: int) -> FloatRow:
        raise AssertionError("nothing was drawn")

    def said(self, row: int, token: int) -> Choice:
        return Choice(token, float("nan"))
