"""What is compared: every tree construction under every rule that takes it, for every drafter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from outrider.core.construction import CONSTRUCTIONS, shaped_of
from outrider.core.contract import LENIENT, LOSSY, RULES, SHARED_NOISE, Contract
from outrider.core.rules import Drawn, rule_of

OURS = SHARED_NOISE, "best-first"
MODELS = ("drafter", "mid")
MODEL_FREE = ("prompt lookup", "suffix index")
DRAFTERS = MODELS + MODEL_FREE
LENIENCE = 0.5
DEPTH = 24  # most of a tree; the router's default ceiling
FEWEST = 8  # nodes from which on ours is judged


class Cell(NamedTuple):
    """One figure of the tables."""

    drafter: str
    temperature: float
    rule: str
    construction: str
    budget: int  # nodes

    @property
    def ours(self) -> bool:
        """Whether this is what Outrider does by default."""
        return (self.rule, self.construction) == OURS

    @property
    def lossy(self) -> bool:
        """Whether the text is not distributed as the target's own."""
        return self.rule in LOSSY


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run measures."""

    drafters: tuple[str, ...] = DRAFTERS
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    budgets: tuple[int, ...] = (4, 8, 16, 32, 64)
    noises: int = 6  # draws of the shared noise at each root
    drafts: int = 3  # draws of trees
    roots: int = 4  # of each text
    stride: int = 12  # tokens between them
    taught: int = 48  # tokens of each text that drafters learn from
    others: tuple[tuple[str, Path], ...] = ()  # names and folders of more drafters: models, or heads on the target
    ours_alone: bool = False  # leave out the other rules and constructions


def contract_of(rule: str, temperature: float, seed: int, draw: int = 0) -> Contract:
    """The terms of a generation; a draw is another choice of the same seed."""
    lenience = LENIENCE if rule == LENIENT else 1.0
    return Contract(seed, 1024, choice=draw, temperature=temperature, rule=rule, lenience=lenience)


def drawn_of(rule: str) -> Drawn:
    """How a rule wants its trees."""
    return rule_of(contract_of(rule, 1.0, 0)).drawn


def taken(rule: str, construction: str, drafter: str) -> bool:
    """Whether a rule takes a construction's trees from a drafter.

    Held p against q, children must be drawn from q, in a shape that ignores the draws; and who has no q has none to be
    held against. Rules of chains take chains.
    """
    if drawn_of(rule) is not Drawn.SAMPLED:
        return drafter != "prompt lookup" or construction in ("best-first", "chain")  # it knows one path alone
    shaped = shaped_of(construction).name == construction
    chain = rule_of(contract_of(rule, 1.0, 0)).chain
    return drafter in MODELS and shaped and (construction == "chain" or not chain)


def cells_of(setting: Setting) -> Iterator[Cell]:
    """All that are measured."""
    for drafter in setting.drafters:
        for temperature in setting.temperatures:
            for rule in RULES:
                for construction in CONSTRUCTIONS:
                    if taken(rule, construction, drafter) and (not setting.ours_alone or (rule, construction) == OURS):
                        for budget in setting.budgets:
                            yield Cell(drafter, temperature, rule, construction, budget)
