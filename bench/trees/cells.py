"""The cells of the comparison: every tree construction with every rule that accepts its trees, for every drafter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from outrider.core.acceptance import ChildSampling, rule_of
from outrider.core.construction import CONSTRUCTIONS, static_construction_of
from outrider.core.session.contract import LENIENT, LOSSY, RULES, SHARED_NOISE, Contract

OURS = SHARED_NOISE, "best-first"
MODELS = ("drafter", "mid")
MODEL_FREE = ("prompt lookup", "suffix index")
DRAFTERS = MODELS + MODEL_FREE
LENIENCE = 0.5
DEPTH = 24  # limit of a tree; the router's default ceiling
FEWEST = 8  # smallest budget, in nodes, that the last line counts


class Cell(NamedTuple):
    """One figure of the tables."""

    drafter: str
    temperature: float
    rule: str
    construction: str
    budget: int  # nodes

    @property
    def ours(self) -> bool:
        """Whether this is Outrider's default rule and construction."""
        return (self.rule, self.construction) == OURS

    @property
    def lossy(self) -> bool:
        """Whether the rule changes the distribution of the text."""
        return self.rule in LOSSY


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of a run."""

    drafters: tuple[str, ...] = DRAFTERS
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    budgets: tuple[int, ...] = (4, 8, 16, 32, 64)
    noises: int = 6  # draws of the shared noise at each root
    drafts: int = 3  # draws of trees at each root
    roots: int = 4  # of each text
    stride: int = 12  # tokens between two roots
    taught: int = 48  # tokens of each text that drafters learn from
    others: tuple[tuple[str, Path], ...] = ()  # names and folders of more drafters: models, or heads on the target
    ours_alone: bool = False  # leave out the other rules and constructions


def contract_of(rule: str, temperature: float, seed: int, draw: int = 0) -> Contract:
    """Return the contract of a generation; each draw is another choice of the same seed."""
    lenience = LENIENCE if rule == LENIENT else 1.0
    return Contract(seed, 1024, choice=draw, temperature=temperature, rule=rule, lenience=lenience)


def drawn_of(rule: str) -> ChildSampling:
    """Return how a rule requires children to be sampled."""
    return rule_of(contract_of(rule, 1.0, 0)).child_sampling


def taken(rule: str, construction: str, drafter: str) -> bool:
    """Return whether a rule accepts a construction's trees from a drafter.

    A rule that compares p with q requires children that are drawn from q, in a shape that does not depend on the draws,
    and a drafter that has a distribution q. Rules for chains accept only chains.
    """
    if drawn_of(rule) is not ChildSampling.SAMPLED:
        return drafter != "prompt lookup" or construction in ("best-first", "chain")  # prompt lookup has only one path
    shaped = static_construction_of(construction).name == construction
    chain = rule_of(contract_of(rule, 1.0, 0)).chain
    return drafter in MODELS and shaped and (construction == "chain" or not chain)


def cells_of(setting: Setting) -> Iterator[Cell]:
    """Yield all cells of a run."""
    for drafter in setting.drafters:
        for temperature in setting.temperatures:
            for rule in RULES:
                for construction in CONSTRUCTIONS:
                    if taken(rule, construction, drafter) and (not setting.ours_alone or (rule, construction) == OURS):
                        for budget in setting.budgets:
                            yield Cell(drafter, temperature, rule, construction, budget)
