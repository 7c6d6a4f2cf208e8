"""What sizes make a middle tier pay: a cost model over measured acceptance. `python -m bench.trees.cascade`.

A step's tree is grown by a drafter alone, by the middle model alone, or by both: in each *round* the drafter grows some
levels below the best that is known, and one pass of the middle model judges all of it and adds children. How many
tokens a step then commits is measured on the reference models; what it takes is counted in passes: the target's over
all nodes, the middle model's over as many, the drafter's levels. So for each ratio of the models' passes there is a
best number of levels and rounds, and a speed.
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
from bench.trees.measuring import LEVEL, SEED, Lessons, teach, text_of
from bench.trees.paths import Path, PathRows, load
from outrider.cli.load import read_prompts
from outrider.core.contract import SHARED_NOISE
from outrider.core.sampler import Sampler

NODES = 24  # of a tree, and of one pass that judges; the router's default
WIDTH = 4
LEVELS = 10  # most of a draft model that is alone
ROUNDS = 3
LEVELS_A_ROUND = (2, 4, 6)
TARGETS = (2, 4, 8, 16, 32)  # passes of the middle model that the target's takes
MIDDLES = (2, 4, 8, 16)  # levels of the drafter that a pass of the middle model takes

Lengths = dict["Way", float]  # acceptance lengths


class Way(NamedTuple):
    """How a step's tree is grown."""

    drafter: int  # levels of the drafter, in each round
    rounds: int  # passes of the middle model

    @property
    def tiers(self) -> str:
        """Who takes part."""
        return "mid < drafter" if self.drafter and self.rounds else "drafter" if self.drafter else "mid"

    def cost(self, middle: float, drafter: float) -> float:
        """In passes of the target, itself included, if the others take these shares of one."""
        return 1.0 + max(1, self.rounds) * self.drafter * drafter + self.rounds * middle


class Tree:
    """Paths and the logarithms of their last tokens' chances, as they are believed at the moment."""

    def __init__(self) -> None:
        self.edges: dict[Path, float] = {}
        self._below: defaultdict[Path, list[Path]] = defaultdict(list)
        self._expanded: dict[int, set[Path]] = {0: set(), 1: set()}  # by model

    def best(self, count: int) -> list[Path]:
        """The nodes with the best path scores, best first."""
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
        """One pass over the best nodes that this model has not seen. One that `judges` gives their children its own
        chances; another only adds."""
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

    def accepts(self, said: Sequence[int]) -> int:
        """How far the best nodes follow what the target says."""
        paths, depth = set(self.best(NODES)), 0
        while depth < len(said) and tuple(said[: depth + 1]) in paths:
            depth += 1
        return depth


def lengths_at(drafter: Scores, middle: Scores, said: Sequence[int]) -> Lengths:
    """At one root: what a step commits, for every way to grow its tree."""
    found: Lengths = {}
    for model, scores in ((0, drafter), (1, middle)):
        tree = Tree()
        for level in range(1, LEVELS + 1):
            tree.expand(model, scores, LEVEL, judges=False)
            found[Way(level, 0) if model == 0 else Way(0, level)] = 1.0 + tree.accepts(said)
    for levels in LEVELS_A_ROUND:
        tree = Tree()
        for done in range(1, ROUNDS + 1):
            for _ in range(levels):
                tree.expand(0, drafter, LEVEL, judges=False)
            tree.expand(1, middle, NODES, judges=True)
            found[Way(levels, done)] = 1.0 + tree.accepts(said)
    return found


def measure(
    models: dict[str, PathRows], lessons: Lessons, prompts: Sequence[Sequence[int]], heat: float, tokens: int
) -> Lengths:
    """The means over places in the target's texts."""
    sums: defaultdict[Way, float] = defaultdict(float)
    roots = 0
    for number, prompt in enumerate(prompts):
        seed = SEED + 1000 + number
        text = text_of(models["target"], prompt, heat, seed, tokens + DEPTH)
        for name in ("drafter", "mid"):
            models[name].read(text.tokens)
        for place in range(len(prompt) - 1 + tokens, len(prompt) - 1, -7):
            before = text.tokens[: place + 1]
            contract = contract_of(SHARED_NOISE, heat, seed)
            sampler = Sampler(contract, models["target"].vocabulary, before, text.prompt)
            scores = []
            for name in ("drafter", "mid"):
                models[name].root(place)
                learned = lessons.of[name, heat, True]
                scores.append(ModelScores(models[name], sampler, learned, hints_of(before, DEPTH), shared=True))
            for way, length in lengths_at(scores[0], scores[1], text.tokens[place + 1 :]).items():
                sums[way] += length
            roots += 1
    return {way: total / roots for way, total in sums.items()}


def fastest(lengths: Lengths, tiers: str, middle: float, drafter: float) -> tuple[Way, float]:
    """The best way for these tiers, and its speed in tokens for a pass of the target."""
    ways = [way for way in lengths if way.tiers == tiers]
    best = max(ways, key=lambda way: lengths[way] / way.cost(middle, drafter))
    return best, lengths[best] / best.cost(middle, drafter)


def table_of(lengths: Lengths, heat: float) -> Table:
    """For every ratio of the models, the best way with and without the middle tier below which the drafter works."""
    table = Table(title=f"temperature {heat:g}: tokens for a pass of the target", title_justify="left", box=SIMPLE)
    headings = ("target / mid", "mid / level", "drafter", "mid", "mid < drafter", "rounds x levels", "over the best")
    for heading in headings:
        table.add_column(heading, justify="right")
    for target in TARGETS:
        table.add_section()
        for middle in MIDDLES:
            shares = 1 / target, 1 / target / middle
            alone = [fastest(lengths, tiers, *shares)[1] for tiers in ("drafter", "mid")]
            way, both = fastest(lengths, "mid < drafter", *shares)
            figures = (f"{speed:.2f}" for speed in (*alone, both))
            rounds = f"{way.rounds} x {way.drafter}"
            table.add_row(str(target), str(middle), *figures, rounds, f"{both / max(alone):.2f}")
    return table


def main(
    prompts: Annotated[int, typer.Option(min=1, help="Held-out ones that are measured on.")] = 8,
    tokens: Annotated[int, typer.Option(min=7, help="Of each text.")] = 140,
    temperatures: Annotated[list[float] | None, typer.Option("--temperature", help="[default: 0.6 and 1]")] = None,
    models: Annotated[File, typer.Option(help="Folder that holds target/, mid/ and drafter/.")] = File("models"),
    texts: Annotated[File, typer.Option(help="JSON lines with an id and a prompt.")] = File("examples/held_out.jsonl"),
) -> None:
    """Acceptance by tiers, and what sizes of models make three of them the fastest."""
    short = [prompt for _, prompt in read_prompts(texts, "#short")]
    tokenizer = Tokenizer.from_file(str(models / "target" / "tokenizer.json"))
    ids = [tokenizer.encode(prompt).ids for prompt in short]
    heats = tuple(temperatures or (0.6, 1.0))
    rows = {name: PathRows(load(models / name)) for name in ("target", "mid", "drafter")}
    lessons = teach(Setting(drafters=("drafter", "mid"), temperatures=heats), rows, ids[prompts:])
    screen = Console(highlight=False)
    for heat in heats:
        lengths = measure(rows, lessons, ids[:prompts], heat, tokens)
        for tiers in ("drafter", "mid", "mid < drafter"):
            shown = ", ".join(
                f"{way.rounds} x {way.drafter}: {length:.2f}" if way.rounds and way.drafter else f"{length:.2f}"
                for way, length in lengths.items()
                if way.tiers == tiers
            )
            screen.print(f"T = {heat:g}, {tiers}, by levels (rounds x levels): {shown}", soft_wrap=True)
        screen.print(table_of(lengths, heat))


if __name__ == "__main__":
    typer.run(main)
