"""Which model sizes make a middle tier pay: a cost model over measured acceptance. `python -m bench.trees.cascade`.

A step's tree is grown by a drafter alone, by the middle model alone, or by both: in each *round* the drafter grows some
levels below the best nodes, and one pass of the middle model scores all of them and adds children. The number of tokens
that a step commits is measured on the reference models. The cost is counted in passes: the target's over all nodes, the
middle model's over as many, and the drafter's levels. So each ratio of the models' passes has a best number of levels
and rounds, and a speed.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path as File
from typing import Annotated, NamedTuple

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from bench.trees.cells import DEPTH, Setting, contract_of
from bench.trees.drafts import ModelScores, Scores, hints_of
from bench.trees.measuring import LEVEL, SEED, LearnedRates, teach, text_of
from bench.trees.paths import Path, PathRows, load
from outrider.cli.performance.load import read_prompts
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import SHARED_NOISE

NODES = 24  # of a tree, and of a scoring pass; the router's default
WIDTH = 4
LEVELS = 10  # limit of a draft model that is alone
ROUNDS = 3
LEVELS_A_ROUND = (2, 4, 6)
TARGETS = (2, 4, 8, 16, 32)  # time of the target's pass over that of the middle model's
MIDDLES = (2, 4, 8, 16)  # time of the middle model's pass over that of a drafter's level

Lengths = dict["CascadeGrowth", float]  # acceptance lengths


class CascadeGrowth(NamedTuple):
    """How a step's tree is grown: levels and rounds."""

    drafter: int  # levels of the drafter, in each round
    rounds: int  # passes of the middle model

    @property
    def tiers(self) -> str:
        """The name of the tiers that take part."""
        return "mid < drafter" if self.drafter and self.rounds else "drafter" if self.drafter else "mid"

    def cost(self, middle: float, drafter: float) -> float:
        """Return the cost of a step in passes of the target, its own pass included.

        `middle`, `drafter`: time of a pass of the middle model and of a drafter's level, as shares of the target's.
        """
        return 1.0 + max(1, self.rounds) * self.drafter * drafter + self.rounds * middle


class CascadeTree:
    """The paths of a tree and their current edge scores, as logarithms."""

    def __init__(self) -> None:
        self.edges: dict[Path, float] = {}
        self._below: defaultdict[Path, list[Path]] = defaultdict(list)
        self._expanded: dict[int, set[Path]] = {0: set(), 1: set()}  # by model

    def best(self, count: int) -> list[Path]:
        """Return the nodes with the best path scores, best first."""
        found: list[Path] = []
        heap = [(-self.edges[path], path) for path in self._below[()]]
        heapq.heapify(heap)
        while heap and len(found) < count:
            cost, path = heapq.heappop(heap)
            found.append(path)
            if len(path) < DEPTH:
                for below in self._below[path]:
                    heapq.heappush(heap, (cost - self.edges[below], below))
        return found

    def expand(self, model: int, scores: Scores, limit: int, *, judges: bool) -> None:
        """Run one pass over the best nodes that this model has not seen, and add their candidates as children.

        If it `judges`, the pass also replaces the edge scores of existing children.
        """
        fresh = [path for path in [(), *self.best(NODES)] if path not in self._expanded[model]][:limit]
        self._expanded[model].update(fresh)
        for path, scored in zip(fresh, scores.after(fresh), strict=True):
            chances = dict(scored)
            if judges:
                for below in self._below[path]:
                    self.edges[below] = chances.get(below[-1], -math.inf)
            for token, edge in scored[:WIDTH]:
                child = (*path, token)
                if child not in self.edges:
                    self.edges[child] = edge
                    self._below[path].append(child)

    def accepts(self, tokens: Sequence[int]) -> int:
        """Return how many of the target's next tokens the best nodes contain as a path."""
        paths, depth = set(self.best(NODES)), 0
        while depth < len(tokens) and tuple(tokens[: depth + 1]) in paths:
            depth += 1
        return depth


def lengths_at(drafter: Scores, middle: Scores, tokens: Sequence[int]) -> Lengths:
    """Return the tokens that a step commits at one root, for every growth. `tokens`: the target's next tokens."""
    found: Lengths = {}
    for model, scores in ((0, drafter), (1, middle)):
        tree = CascadeTree()
        for level in range(1, LEVELS + 1):
            tree.expand(model, scores, LEVEL, judges=False)
            found[CascadeGrowth(level, 0) if model == 0 else CascadeGrowth(0, level)] = 1.0 + tree.accepts(tokens)
    for levels in LEVELS_A_ROUND:
        tree = CascadeTree()
        for done in range(1, ROUNDS + 1):
            for _ in range(levels):
                tree.expand(0, drafter, LEVEL, judges=False)
            tree.expand(1, middle, NODES, judges=True)
            found[CascadeGrowth(levels, done)] = 1.0 + tree.accepts(tokens)
    return found


def measure(
    models: dict[str, PathRows], rates: LearnedRates, prompts: Sequence[Sequence[int]], temperature: float, tokens: int
) -> Lengths:
    """Return the mean acceptance lengths over roots in the target's texts."""
    sums: defaultdict[CascadeGrowth, float] = defaultdict(float)
    roots = 0
    for number, prompt in enumerate(prompts):
        seed = SEED + 1000 + number
        text = text_of(models["target"], prompt, temperature, seed, tokens + DEPTH)
        for name in ("drafter", "mid"):
            models[name].read(text.tokens)
        for place in range(len(prompt) - 1 + tokens, len(prompt) - 1, -7):
            before = text.tokens[: place + 1]
            contract = contract_of(SHARED_NOISE, temperature, seed)
            sampler = Sampler(contract, models["target"].vocabulary, before, text.prompt)
            scores = []
            for name in ("drafter", "mid"):
                models[name].root(place)
                learned = rates.of[name, temperature, True]
                scores.append(ModelScores(models[name], sampler, learned, hints_of(before, DEPTH), shared=True))
            for growth, length in lengths_at(scores[0], scores[1], text.tokens[place + 1 :]).items():
                sums[growth] += length
            roots += 1
    return {growth: total / roots for growth, total in sums.items()}


def fastest(lengths: Lengths, tiers: str, middle: float, drafter: float) -> tuple[CascadeGrowth, float]:
    """Return the best growth for these tiers, and its speed in tokens per pass of the target."""
    growths = [growth for growth in lengths if growth.tiers == tiers]
    best = max(growths, key=lambda growth: lengths[growth] / growth.cost(middle, drafter))
    return best, lengths[best] / best.cost(middle, drafter)


def table_of(lengths: Lengths, temperature: float) -> Table:
    """Return the table with the best growth of each set of tiers, for every ratio of the models."""
    table = Table(
        title=f"temperature {temperature:g}: tokens for a pass of the target", title_justify="left", box=SIMPLE
    )
    headings = ("target / mid", "mid / level", "drafter", "mid", "mid < drafter", "rounds x levels", "over the best")
    for heading in headings:
        table.add_column(heading, justify="right")
    for target in TARGETS:
        table.add_section()
        for middle in MIDDLES:
            shares = 1 / target, 1 / target / middle
            alone = [fastest(lengths, tiers, *shares)[1] for tiers in ("drafter", "mid")]
            growth, both = fastest(lengths, "mid < drafter", *shares)
            figures = (f"{speed:.2f}" for speed in (*alone, both))
            rounds = f"{growth.rounds} x {growth.drafter}"
            table.add_row(str(target), str(middle), *figures, rounds, f"{both / max(alone):.2f}")
    return table


def main(
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts to measure on.")] = 8,
    tokens: Annotated[int, typer.Option(min=7, help="Tokens of each text.")] = 140,
    temperatures: Annotated[list[float] | None, typer.Option("--temperature", help="[default: 0.6 and 1]")] = None,
    models: Annotated[File, typer.Option(help="Folder that holds target/, mid/ and drafter/.")] = File("models"),
    texts: Annotated[File, typer.Option(help="JSON lines with an id and a prompt.")] = File("examples/held_out.jsonl"),
) -> None:
    """Measure acceptance by tiers, and compute which model sizes make a middle tier the fastest."""
    short = [prompt for _, prompt in read_prompts(texts, "#short")]
    tokenizer = Tokenizer.from_file(str(models / "target" / "tokenizer.json"))
    ids = [tokenizer.encode(prompt).ids for prompt in short]
    chosen = tuple(temperatures or (0.6, 1.0))
    rows = {name: PathRows(load(models / name)) for name in ("target", "mid", "drafter")}
    rates = teach(Setting(drafters=("drafter", "mid"), temperatures=chosen), rows, ids[prompts:])
    screen = Console(highlight=False)
    for temperature in chosen:
        lengths = measure(rows, rates, ids[:prompts], temperature, tokens)
        for tiers in ("drafter", "mid", "mid < drafter"):
            shown = ", ".join(
                f"{growth.rounds} x {growth.drafter}: {length:.2f}"
                if growth.rounds and growth.drafter
                else f"{length:.2f}"
                for growth, length in lengths.items()
                if growth.tiers == tiers
            )
            screen.print(f"T = {temperature:g}, {tiers}, by levels (rounds x levels): {shown}", soft_wrap=True)
        screen.print(table_of(lengths, temperature))


if __name__ == "__main__":
    typer.run(main)
