"""Tiers in the benchmarks: which clusters are compared, and what the cost model makes of acceptance lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path as File

import pytest

from bench.options import BenchOptions, BenchSuite
from bench.tiers import SETS, name_of, options_of
from bench.trees.cascade import NODES, CascadeGrowth, CascadeTree, fastest, table_of
from bench.trees.paths import Path
from outrider.core.construction.offline import Scored


def options() -> BenchOptions:
    empty: dict[str, str] = {}
    return BenchOptions(
        (BenchSuite.TIERS,), (1,), (0.0,), (), (), (), 1, 8, "float32", 1, empty, {"threads": 2}, empty, (), (), 8,
        File("models"), {}, False, 1, (1,), (), 1.0, 1.0, (), (),
    )  # fmt: skip


@pytest.mark.parametrize("tiers", SETS)
def test_each_set_of_tiers_is_a_cluster_whose_first_tier_drafts_for_the_target(tiers: tuple[str, ...]) -> None:
    config = options_of(options(), File("models/target"), File("models/mid"), tiers, "all")
    assert [worker.upstream_tier for worker in config.drafters] == [None, 0, 1][: len(tiers)]
    assert [worker.drafts == "suffix" for worker in config.drafters] == [kind == "suffix" for kind in tiers]
    assert [worker.model.name for worker in config.drafters if worker.serves] == [k for k in tiers if k != "suffix"]
    assert (config.router.tiers, config.verifier[0].numerics) == ("all", "invariant")
    assert name_of(tiers).split(" < ") == list(tiers)


class OneCandidate:
    """One candidate after every path, with this chance."""

    def __init__(self, token: int, chance: float) -> None:
        self.row: Scored = [(token, math.log(chance))]

    def after(self, paths: Sequence[Path]) -> list[Scored]:
        return [self.row for _ in paths]


def test_a_pass_that_judges_gives_its_own_chances_and_adds_children() -> None:
    tree = CascadeTree()
    for _ in range(3):
        tree.expand(0, OneCandidate(1, 0.9), 8, judges=False)
    assert tree.best(NODES) == [(1,), (1, 1), (1, 1, 1)]
    assert tree.accepts([1, 1, 1, 1]) == 3
    tree.expand(1, OneCandidate(2, 0.5), NODES, judges=True)
    assert tree.edges[(1,)] == -math.inf
    assert tree.best(1) == [(2,)]
    assert tree.accepts([1, 1]) == 2  # none is dropped
    assert tree.accepts([1, 1, 1, 2]) == 4


def test_the_best_cascade_growth_has_the_most_tokens_for_its_cost() -> None:
    lengths = {
        CascadeGrowth(1, 0): 2.0,
        CascadeGrowth(4, 0): 3.0,
        CascadeGrowth(0, 2): 4.0,
        CascadeGrowth(2, 1): 4.0,
        CascadeGrowth(2, 2): 6.0,
    }
    assert fastest(lengths, "drafter", 0.5, 0.05) == (CascadeGrowth(4, 0), pytest.approx(3.0 / 1.2))
    assert fastest(lengths, "drafter", 0.5, 0.5) == (CascadeGrowth(1, 0), pytest.approx(2.0 / 1.5))
    assert fastest(lengths, "mid", 0.5, 0.05) == (CascadeGrowth(0, 2), pytest.approx(2.0))
    assert fastest(lengths, "mid < drafter", 0.5, 0.05) == (CascadeGrowth(2, 2), pytest.approx(6.0 / 2.2))
    assert table_of(lengths, 1.0).row_count == 20
