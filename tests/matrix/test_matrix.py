"""A tenth of the matrix in a real cluster, and the choice of its cells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.client import FinishReason
from tests.cli.verification.test_compare import generation
from tests.matrix.__main__ import last_line
from tests.matrix.cells import FACTORS, Cell, all_cells, all_pairs, covering, pairs_of
from tests.matrix.clusters import Checkpoints, MatrixCluster, config_of
from tests.matrix.rules import RULE_FACTORS, Law, all_rule_cells
from tests.matrix.running import Asked, Outcome, difference, run

DRAFTING = "model"


@pytest.mark.parametrize("seed", [1, 2])
def test_every_pair_of_values_is_in_a_cell(seed: int) -> None:
    cells = all_cells(seed)
    assert set.union(*map(pairs_of, cells)) == all_pairs(FACTORS)
    least = len(FACTORS["drafting"]) * len(FACTORS["sampling"])
    assert least <= len(cells) <= 1.1 * least
    assert all_cells(seed) == cells
    rules = all_rule_cells(seed)
    assert set.union(*map(pairs_of, rules)) == all_pairs(RULE_FACTORS)


def test_pairs_name_the_positions_of_their_values() -> None:  # bites: of what runs the matrix
    assert pairs_of("ab") == {(0, "a", 1, "b")}
    assert all_pairs({"x": "ab", "y": "c"}) == {(0, "a", 1, "c"), (0, "b", 1, "c")}
    cells = covering({"x": "ab", "y": "cd"}, seed=1)
    assert sorted(cells) == [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")]
    assert [x for x, _ in cells] == ["a", "a", "b", "b"]


def test_any_difference_from_plain_decoding_is_a_bug() -> None:
    plain, asked = generation([5, 6, 7]), Asked("a", 1)
    assert difference(asked, plain, plain) == ""
    for changes in ({"token_ids": (5, 6)}, {"text": "x"}, {"finish_reason": FinishReason.CANCELLED}):
        (name,) = changes
        assert difference(asked, plain, replace(plain, **changes)).startswith(f"a, choice 1: {name}: ")
    cell, rule = all_cells(1)[0], all_rule_cells(1)[0]
    outcomes = [Outcome(cell, ""), Outcome(cell, "it differs")]
    laws = [Law(rule, 10, 5, 1e-5), Law(rule, 10, 5, 0.5)]
    assert last_line(outcomes, laws) == "matrix: cells=2 identical=1 bugs=1 laws=1 broken=1"


@pytest.mark.asyncio
@pytest.mark.timeout(180)
async def test_a_tenth_of_the_matrix_shows_no_bug(tmp_path: Path) -> None:
    cells = [cell for cell in all_cells(1) if cell.drafting == DRAFTING]
    made = Checkpoints(tmp_path)
    async with MatrixCluster(config_of(DRAFTING, made), lambda name, line: print(name, line)) as cluster:
        outcomes = [await run(cell, cluster, made.prompt) for cell in cells]
    for outcome in outcomes:
        print(outcome.cell, outcome.tokens, outcome.accepted, outcome.struck)
    assert [(outcome.cell, outcome.problem) for outcome in outcomes if outcome.problem] == list[tuple[Cell, str]]()
    assert sum(outcome.accepted for outcome in outcomes) > 100
    assert any(outcome.struck for outcome in outcomes)
