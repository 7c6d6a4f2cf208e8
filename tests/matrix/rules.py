"""Under the rules that compare distributions a text is a sample of its own: its tokens must follow the target's law."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import outrider
from outrider.cli.verification.distribution_check import LEVEL, p_value
from outrider.cli.verification.reference import Reference
from outrider.client._terms import grammar_of
from outrider.core.session.contract import LOSSY, RULES, SHARED_NOISE, Contract, RuleName
from tests.matrix.cells import Factors, covering
from tests.matrix.clusters import Checkpoints, MatrixCluster
from tests.matrix.running import ANSWERS, MODELS, SAMPLING, TIMEOUT_S, WAITING

TEXTS = 24  # of a cell
AT_ONCE = 8
MAX_TOKENS = 60
SEED = 1  # of the shares in quantiles


class RuleCell(NamedTuple):
    """One value of each factor."""

    rule: RuleName
    sampling: str
    answer: str
    adapting: str


RULE_FACTORS: Factors = {
    "rule": tuple(rule for rule in RULES if rule not in (*LOSSY, SHARED_NOISE)),
    "sampling": tuple(name for name in SAMPLING if name != "T 0"),
    "answer": ("free", "JSON schema", "regex"),
    "adapting": ("no adapter", "adapter A"),
}
DRAFTING = "model"  # all sessions have drafts by a model


def all_rule_cells(seed: int) -> list[RuleCell]:
    """Cells in which every pair of values occurs."""
    return [RuleCell(*values) for values in covering(RULE_FACTORS, seed)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Law:
    """What became of a cell."""

    cell: RuleCell
    tokens: int
    accepted: int  # drafted tokens
    p: float  # of the hypothesis that they follow the target's law; 0 with a token that it does not allow

    def broken(self, cells: int) -> bool:
        """Return whether the law is broken, at a level that holds for `cells` cells together."""
        return self.p * cells < LEVEL


def references(made: Checkpoints) -> dict[str, Reference]:
    """The target in transformers, without an adapter and with one."""
    return {"target": Reference(made.target), "a": Reference(made.target, adapter=made.adapters / "a")}


async def draw(cell: RuleCell, cluster: MatrixCluster, judges: Mapping[str, Reference], prompt: Sequence[int]) -> Law:
    """The texts of a cell, and how they follow the law."""
    (model,) = MODELS[cell.adapting]
    terms, constraint, room = SAMPLING[cell.sampling], ANSWERS[cell.answer], asyncio.Semaphore(AT_ONCE)

    async with cluster.client() as client:

        async def text(seed: int) -> outrider.Generation:
            async with room:
                return await client.generate(
                    prompt,
                    model=model,
                    rule=cell.rule,
                    seed=seed,
                    max_tokens=MAX_TOKENS,
                    ignore_eos=not constraint,
                    speculation=WAITING,
                    timeout=TIMEOUT_S,
                    **terms,
                    **constraint,
                )

        texts = await asyncio.gather(*map(text, range(TEXTS)))
    grammar, dice = grammar_of(constraint), np.random.default_rng(SEED)
    contract = Contract(seed=0, max_tokens=MAX_TOKENS, grammar=grammar, **terms)
    quantiles = np.concatenate([judges[model].quantiles(prompt, it.token_ids, contract, dice) for it in texts])
    p = 0.0 if np.isnan(quantiles).any() else p_value(quantiles)
    return Law(cell, len(quantiles), sum(it.usage.accepted for it in texts), p)
