"""What is combined with what, and cells in which every pair of values occurs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

CANDIDATES = 40  # cells that are made for each one that is taken


class Cell(NamedTuple):
    """One value of each factor."""

    drafting: str
    sampling: str
    answer: str
    adapting: str
    asking: str
    event: str


Factors = Mapping[str, Sequence[str]]
Pair = tuple[int, str, int, str]  # two factors, by their places, and their values

FACTORS: Factors = {
    "drafting": (
        *("none", "model", "padded vocabulary", "another tokenizer", "suffix"),
        *("heads", "remote heads", "two drafters", "tiers"),
    ),
    "sampling": ("T 0", "T 1", "top-p", "min-p", "penalties", "bias"),
    "answer": ("free", "JSON schema", "regex", "tool call"),
    "adapting": ("no adapter", "adapter A", "A and B in one batch"),
    "asking": ("log-probabilities", "stop strings", "min_tokens", "n = 3"),
    "event": ("undisturbed", "verifier killed", "router killed", "forked"),
}
assert tuple(FACTORS) == Cell._fields


def pairs_of(cell: Sequence[str]) -> set[Pair]:
    """The pairs of values in a cell."""
    return {(i, cell[i], j, cell[j]) for i, j in combinations(range(len(cell)), 2)}


def all_pairs(factors: Factors) -> set[Pair]:
    """Every pair of values of two factors."""
    values = [*factors.values()]
    return {(i, a, j, b) for i, j in combinations(range(len(values)), 2) for a in values[i] for b in values[j]}


def all_cells(seed: int) -> list[Cell]:
    """The cells of the matrix."""
    return [Cell(*values) for values in covering(FACTORS, seed)]


def covering(factors: Factors, seed: int) -> list[tuple[str, ...]]:
    """Cells in which every pair of values occurs, few of them; those with one value of the first factor follow each
    other.

    Greedy, as AETG (Cohen et al. 1997): of many candidates, each grown from a pair that is missing value by value, that
    one is taken which brings the most pairs.
    """
    dice, missing, cells = random.Random(seed), all_pairs(factors), list[tuple[str, ...]]()
    while missing:
        pairs = sorted(missing)
        grown = [_grown(dice.choice(pairs), factors, missing, dice) for _ in range(CANDIDATES)]
        best = max(grown, key=lambda cell: len(pairs_of(cell) & missing))
        missing -= pairs_of(best)
        cells.append(best)
    first = [*next(iter(factors.values()))]
    return sorted(cells, key=lambda cell: first.index(cell[0]))


def _grown(pair: Pair, factors: Factors, missing: set[Pair], dice: random.Random) -> tuple[str, ...]:
    """A cell with the pair in it, whose other values bring as many missing pairs as they can, one after another."""
    values = [*factors.values()]
    chosen = {pair[0]: pair[1], pair[2]: pair[3]}
    for place in dice.sample([*_others(chosen, len(values))], len(values) - len(chosen)):
        gains = {value: _gain(place, value, chosen, missing) for value in values[place]}
        most = max(gains.values())
        chosen[place] = dice.choice([value for value, gain in gains.items() if gain == most])
    return tuple(chosen[place] for place in range(len(values)))


def _others(chosen: Mapping[int, str], count: int) -> Iterator[int]:
    return (place for place in range(count) if place not in chosen)


def _gain(place: int, value: str, chosen: Mapping[int, str], missing: set[Pair]) -> int:
    """How many missing pairs the value has with those chosen."""
    return sum(
        ((place, value, other, theirs) if place < other else (other, theirs, place, value)) in missing
        for other, theirs in chosen.items()
    )
