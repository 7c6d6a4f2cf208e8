"""Measures acceptance lengths at roots along the target's texts, with the same roots, rows and draws for every cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from bench.trees.cells import DEPTH, LENIENCE, OURS, Cell, Setting, contract_of, drawn_of, taken
from bench.trees.drafts import WIDTH, LookupScores, ModelScores, NoisedScores, Scores, SourceScores, hints_of
from bench.trees.expecting import NEGLIGIBLE, ExpectedTree, followed, matched, rejected, traversed
from bench.trees.fitting import (
    DrafterRates,
    TargetText,
    best_of,
    learn_heads,
    learn_lookup,
    learn_model,
    learn_suffixes,
    whole_row,
)
from bench.trees.paths import Path, PathRows, TextRows, continued
from outrider.core.acceptance import DRAFT, ChildSampling, SeededRandom, SparseRow, rule_of
from outrider.core.construction import CONSTRUCTIONS, TreeTerms, construction_of, grow, static_construction_of
from outrider.core.proposers.suffixes import FinishedOutputs
from outrider.core.sampling.filters import FloatRow
from outrider.core.sampling.sampler import Choice, Sampler
from outrider.core.session.contract import RULES, SHARED_NOISE, Plan
from outrider.core.session.digest import EMPTY, extend
from outrider.core.tree.node import Node
from outrider.core.tree.static_trees import Shape
from outrider.core.tree.token_tree import TokenTree

LEVEL = 8  # nodes that a pass expands, the drafter's default; EAGLE-2's k
ARITY = 2  # of the k-ary tree
SEED = 2024

Figures = dict[Cell, float]  # acceptance lengths


@dataclass(slots=True)
class LearnedRates:
    """The fitted statistics of all drafters, from the texts of other prompts than the measured ones."""

    of: dict[tuple[str, float, bool], DrafterRates] = field(
        default_factory=dict
    )  # by drafter, T, whether noise is shared
    outputs: dict[float, FinishedOutputs] = field(default_factory=dict)


def teach(setting: Setting, models: Mapping[str, TextRows], prompts: Sequence[Sequence[int]]) -> LearnedRates:
    """Fit the drafters' statistics to the target's texts after some prompts."""
    rates, target = LearnedRates(), models["target"]
    assert isinstance(target, PathRows)
    for temperature in setting.temperatures:
        texts = [text_of(target, prompt, temperature, SEED + at, setting.taught) for at, prompt in enumerate(prompts)]
        contracts = [contract_of(SHARED_NOISE, temperature, SEED + at) for at in range(len(texts))]
        for name in setting.drafters:
            rows = models.get(name)
            if isinstance(rows, PathRows):
                for shared in (True, False):
                    learned = DrafterRates()
                    for text, contract in zip(texts, contracts, strict=True):
                        learn_model(learned, rows, target, text, contract, shared=shared)
                    rates.of[name, temperature, shared] = learned
            elif rows is not None:
                rates.of[name, temperature, True] = learned = DrafterRates()
                for text, contract in zip(texts, contracts, strict=True):
                    learn_heads(learned, rows, text, contract)
            elif name == "prompt lookup":
                rates.of[name, temperature, True] = learn_lookup(texts, contracts)
            else:
                rates.of[name, temperature, True], rates.outputs[temperature] = learn_suffixes(texts, contracts)
    return rates


def text_of(target: TextRows, prompt: Sequence[int], temperature: float, seed: int, count: int) -> TargetText:
    """Return the target's text after a prompt."""
    return TargetText(
        tuple(continued(target, prompt, contract_of(SHARED_NOISE, temperature, seed), count)), len(prompt)
    )


def measure(
    setting: Setting, models: Mapping[str, TextRows], rates: LearnedRates, prompt: Sequence[int], number: int
) -> Figures:
    """Return the mean acceptance length of every cell over the roots of one prompt's texts. `number` decides the
    seeds."""
    totals: defaultdict[Cell, float] = defaultdict(float)
    target = models["target"]
    seed = SEED + 1000 + number
    for temperature in setting.temperatures:
        text = text_of(target, prompt, temperature, seed, (setting.roots - 1) * setting.stride)
        for name in ("target", *(name for name in setting.drafters if name in models)):
            models[name].read(text.tokens)
        for place in range(len(text.tokens) - 1, len(prompt) - 2, -setting.stride):
            for rows in models.values():
                rows.root(place)
            root = MeasuredRoot(setting, models, rates, text, place, temperature, seed)
            for name in setting.drafters:
                for cell, length in root.figures(name).items():
                    totals[cell] += length / setting.roots
    return dict(totals)


class MeasuredRoot:
    """One root: a position in a text, at one temperature."""

    def __init__(
        self,
        setting: Setting,
        models: Mapping[str, TextRows],
        rates: LearnedRates,
        text: TargetText,
        place: int,
        temperature: float,
        seed: int,
    ) -> None:
        self._setting = setting
        self._models = models
        self._target = models["target"]
        self._rates = rates
        self._text = text.tokens[: place + 1]
        self._temperature = temperature
        self._seed = seed
        self._draws = {  # at temperature 0 nothing is random
            ChildSampling.FREELY: range(setting.noises if temperature else 1),
            ChildSampling.RANKED: range(1),
            ChildSampling.SAMPLED: range(setting.drafts if temperature else 1),
        }
        self._samplers = [
            Sampler(
                contract_of(SHARED_NOISE, temperature, seed, draw), self._target.vocabulary, self._text, text.prompt
            )
            for draw in self._draws[ChildSampling.FREELY]
        ]
        self._hints = hints_of(self._text, DEPTH)
        self._known: dict[tuple[str, bool, int], Scores] = {}
        self._q: dict[tuple[str, Path], tuple[SparseRow, FloatRow]] = {}
        self._p: dict[Path, FloatRow] = {}
        self._tokens: dict[tuple[int, Path], int] = {}

    def figures(self, drafter: str) -> Figures:
        """Return the acceptance length of each of a drafter's cells: 1 + accepted."""
        found: Figures = {}
        for kind, rules in _rules().items():
            for construction in CONSTRUCTIONS:
                fitting = [rule for rule in rules if self._wanted(rule, construction, drafter)]
                if fitting:
                    self._fill(found, drafter, kind, construction, fitting)
        return found

    def _wanted(self, rule: str, construction: str, drafter: str) -> bool:
        return taken(rule, construction, drafter) and (not self._setting.ours_alone or (rule, construction) == OURS)

    def _fill(self, found: Figures, drafter: str, kind: ChildSampling, construction: str, rules: Sequence[str]) -> None:
        budgets = self._setting.budgets
        draws = self._draws[kind]
        trees = {
            (budget, draw): self._tree(drafter, kind, construction, budget, draw)
            for budget in sorted(budgets, reverse=True)  # the largest first: its rows are reused for the others
            for draw in draws
        }
        if kind is not ChildSampling.FREELY:
            self._prefetch([tree for tree, _ in trees.values()], all_nodes=kind is ChildSampling.SAMPLED)
        for (budget, draw), (tree, q) in trees.items():
            for rule in rules:
                cell = Cell(drafter, self._temperature, rule, construction, budget)
                accepted = self._accepted(rule, tree, q, draw)
                found[cell] = found.get(cell, 1.0) + accepted / len(draws)

    def _accepted(self, rule: str, tree: ExpectedTree, q: Mapping[Path, FloatRow], draw: int) -> float:
        """Return the expected number of nodes of a tree that a rule accepts."""
        match rule:
            case "shared-noise":
                return followed(tree, partial(self._choose, draw))
            case "target-match":
                return matched(tree, self._row)
            case "typical-acceptance":
                walk = rule_of(contract_of(rule, self._temperature, 0)).walk(
                    tree.rows, _Typical(self._row, tree), SeededRandom(0)
                )
                return float(len(walk.path))
            case "traversal-verification" | "block-verification":
                return traversed(tree, self._row, q.__getitem__)
            case _:
                lenience = LENIENCE if rule.startswith("lenient") else 1.0
                return rejected(tree, self._row, q.__getitem__, lenience)

    def _tree(
        self, drafter: str, kind: ChildSampling, construction: str, budget: int, draw: int
    ) -> tuple[ExpectedTree, Mapping[Path, FloatRow]]:
        """Return a drafter's tree, and, for sampled trees, q after each node with children."""
        width = ARITY if construction == "k-ary" else WIDTH
        plan = Plan(depth=DEPTH, width=width, nodes=budget)
        shared = kind is ChildSampling.FREELY or drafter not in self._models
        learned = self._rates.of[drafter, self._temperature, shared]
        ranks = learned.drawn if kind is ChildSampling.SAMPLED else learned.ranks
        if kind is ChildSampling.FREELY and self._temperature and drafter not in self._models:
            ranks = learned.noised_ranks
        rates = ranks.rates()
        shaped = static_construction_of(construction)
        terms = TreeTerms(plan, 2**31 if shaped.name == construction else LEVEL, rates=rates)
        if kind is ChildSampling.SAMPLED:
            return self._drawn(drafter, shaped.shape(terms), draw)
        tree = TokenTree(self._text)
        scores = self._scores(drafter, kind, draw, learned)

        def judge(nodes: Sequence[Node]) -> Sequence[Sequence[tuple[int, float]]]:
            return scores.after([tuple(tree.path(node)) for node in nodes])

        nodes = grow(tree, construction_of(construction), terms, judge)
        return ExpectedTree.of([tuple(tree.path(node)) for node in nodes]), {}

    def _scores(self, drafter: str, kind: ChildSampling, draw: int, learned: DrafterRates) -> Scores:
        """Return the drafter's scores at this root, which all constructions and budgets share."""
        shared = kind is ChildSampling.FREELY and self._temperature > 0.0
        key = drafter, shared, draw if shared else 0
        if key not in self._known:
            sampler = self._samplers[key[2]]
            if drafter in self._models:
                self._known[key] = ModelScores(
                    self._models[drafter],
                    sampler,
                    learned,
                    {} if learned.below else self._hints,
                    shared=kind is ChildSampling.FREELY,
                )
            elif shared:
                source = self._scores(drafter, ChildSampling.RANKED, 0, learned)
                self._known[key] = NoisedScores(source, self._text, sampler.contract, learned)
            elif drafter == "prompt lookup":
                self._known[key] = LookupScores(self._text, learned, DEPTH)
            else:
                both = best_of(self._text, self._rates.outputs[self._temperature])
                self._known[key] = SourceScores(both, self._text, learned)
        return self._known[key]

    def _drawn(self, drafter: str, shape: Shape, draw: int) -> tuple[ExpectedTree, Mapping[Path, FloatRow]]:
        """Return a sampled tree of a shape. The draws of a smaller tree are the first ones of a larger tree."""
        paths: list[Path] = []
        q: dict[Path, FloatRow] = {}
        level: list[tuple[Path, Shape]] = [((), shape)]
        while level:
            level = [(path, below) for path, below in level if below]
            self._models[drafter].fetch(path for path, _ in level)
            children: list[tuple[Path, Shape]] = []
            for path, below in level:
                row, q[path] = self._draft_row(drafter, path)
                chance = SeededRandom(self._seed, draw, extend(EMPTY, (len(self._text), *path)), DRAFT)
                drawn = row.draw(len(below), chance)
                children += [((*path, token), under) for token, under in zip(drawn, below, strict=False)]
            paths += [path for path, _ in children]
            level = children
        return ExpectedTree.of(paths), q

    def _draft_row(self, drafter: str, path: Path) -> tuple[SparseRow, FloatRow]:
        if (drafter, path) not in self._q:
            row = whole_row(self._samplers[0].probabilities(self._models[drafter].after(path), path))
            self._q[drafter, path] = row, row.dense(self._target.vocabulary)
        return self._q[drafter, path]

    def _prefetch(self, trees: Iterable[ExpectedTree], *, all_nodes: bool) -> None:
        """Compute the target's rows that will be needed: of all nodes in one pass, or else one level in each pass, only
        of the nodes that are reached with a relevant probability."""
        parents = {tree.paths[row] for tree in trees for row, below in enumerate(tree.rows.children) if below}
        if all_nodes:
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
        """Return the target's distribution after a path."""
        if path not in self._p:
            self._p[path] = self._samplers[0].probabilities(self._target.after(path), path)
        return self._p[path]

    def _choose(self, draw: int, path: Path) -> int:
        """Return the target's token after a path under one draw of the noise."""
        if (draw, path) not in self._tokens:
            self._tokens[draw, path] = self._samplers[draw].choose(self._target.after(path), path).token
        return self._tokens[draw, path]


def _rules() -> dict[ChildSampling, list[str]]:
    """Return the rules by how they require children to be sampled."""
    rules: dict[ChildSampling, list[str]] = {kind: [] for kind in ChildSampling}
    for rule in RULES:
        rules[drawn_of(rule)].append(rule)
    return rules


class _Typical:
    """The target's choices for typical acceptance, which needs only p."""

    def __init__(self, row: Callable[[Path], FloatRow], tree: ExpectedTree) -> None:
        self._row = row
        self._tree = tree

    def choose(self, row: int) -> Choice:
        raise AssertionError("there is no shared noise here")

    def p(self, row: int) -> FloatRow:
        return self._row(self._tree.paths[row])

    def q(self, row: int) -> FloatRow:
        raise AssertionError("nothing was drawn")

    def choice_of(self, row: int, token: int) -> Choice:
        return Choice(token, float("nan"))
