"""The benchmark of trees: its expectations are the rules' own, its tables are whole, and it counts the lost cells."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bench.trees import __main__ as command
from bench.trees import ahead, tables
from bench.trees.cells import OURS, Cell, Setting, cells_of, taken
from bench.trees.expecting import ExpectedTree, followed, matched, rejected, traversed
from bench.trees.figures import Estimate, last_line, verdicts
from bench.trees.fitting import DrafterRates, RankMeans, TargetText
from bench.trees.paths import PathRows, continued, load
from outrider.core.acceptance import RandomSource, Rule, rule_of
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import SHARED_NOISE, Contract
from outrider.engine.checkpoints.checkpoint import read_config
from outrider.engine.heads.checkpoint_io import make_network, save_network
from outrider.engine.heads.config import make_heads_config
from tests.core.acceptance.enumeration import JudgeOf, Language, drawn, outcomes
from tests.core.acceptance.enumeration import Tree as DrawnTree
from tests.engine.small_checkpoints import MODELS

CHAIN = (((((),),),),)
TREE = (((), ()), ((),))


def rule(name: str, lenience: float = 1.0) -> Rule:
    return rule_of(Contract(seed=0, max_tokens=1, rule=name, lenience=lenience))


def by_enumeration(walker: Rule, language: Language, tree: DrawnTree) -> float:
    """The slow way: every way in which chance can go."""

    def run(chance: RandomSource) -> int:
        return len(walker.walk(tree.rows, JudgeOf(language, tree), chance).path)

    return sum(probability * accepted for probability, accepted in outcomes(run))


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_expected_lengths_equal_those_of_the_acceptance_rules(shape: tuple) -> None:
    names = {"recursive-rejection": rejected, "traversal-verification": traversed}
    if shape is CHAIN:
        names |= {"speculative-sampling": rejected, "block-verification": traversed}
    for seed in range(4):
        language = Language(3, Contract(seed=0, max_tokens=1), seed=seed)
        made = [tree for _, tree in outcomes(lambda chance, lang=language: drawn(lang, shape, chance))]
        for tree in made[:: max(1, len(made) // 6)]:
            same = ExpectedTree.of(tree.paths[1:])

            def q(path: tuple[int, ...], language: Language = language) -> np.ndarray:
                return language.q(path).dense(3)

            for name, expected in names.items():
                assert expected(same, language.p, q) == pytest.approx(
                    by_enumeration(rule(name), language, tree), abs=1e-3
                )
            assert matched(same, language.p) == pytest.approx(
                by_enumeration(rule("target-match"), language, tree), abs=1e-3
            )
            if shape is CHAIN:
                lenient = by_enumeration(rule("lenient-speculative-sampling", 0.5), language, tree)
                assert rejected(same, language.p, q, 0.5) == pytest.approx(lenient, abs=1e-3)


def test_under_shared_noise_the_tree_covers_the_targets_tokens_as_far_as_it_has_them() -> None:
    tree = ExpectedTree.of([(3,), (4,), (3, 1), (3, 1, 7)])
    assert followed(tree, lambda path: [3, 1, 7, 9][len(path)]) == 3
    assert followed(tree, lambda path: [4, 1][len(path)]) == 1
    assert followed(ExpectedTree.of([]), lambda path: 5) == 0


def test_rows_below_a_root_equal_those_of_a_plain_pass() -> None:
    engine = load(MODELS / "drafter")
    rows = PathRows(engine)
    text = list(range(10, 40))
    rows.read(text)
    for place in (29, 15, 9):
        rows.root(place)
        rows.fetch([(5, 6), (5, 7, 8), (9,)])
        for path in [(), (5,), (5, 7, 8), (9,), (9, 4)]:
            found = rows.after(path)
            plain = PathRows(engine).read([*text[: place + 1], *path])[-1]  # overwrites the text: read it anew
            assert np.abs(found - plain).max() < 1e-3
            rows.read(text)
            rows.root(place)
    contract = Contract(seed=7, max_tokens=1)
    generated = continued(rows, [1, 2, 3], contract, 3)
    sampler = Sampler(contract, rows.vocabulary, [1, 2, 3], 3)
    assert generated[3] == sampler.choose(rows.read([1, 2, 3])[-1]).token


def test_means_by_rank_fall() -> None:
    means = RankMeans()
    for chances in ([1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]):
        means.observe(chances)
    rates = means.rates()
    assert rates[0] == pytest.approx(0.6, abs=0.05)
    assert all(0.0 < later <= earlier for earlier, later in itertools.pairwise(rates))


def cell(rule: str, construction: str, budget: int = 8) -> Cell:
    return Cell("drafter", 1.0, rule, construction, budget)


def test_standard_errors_are_over_prompts_and_ours_is_compared_by_pairs() -> None:
    assert Estimate.of([1.0, 2.0, 3.0]) == pytest.approx((2.0, math.sqrt(1.0 / 3)))
    assert math.isnan(Estimate.of([1.0]).error)
    results = {
        cell(*OURS): [3.0, 5.0, 4.0],
        cell(SHARED_NOISE, "chain"): [2.9, 5.1, 3.9],
        cell("typical-acceptance", "chain"): [9.0, 9.0, 9.0],  # lossy
    }
    (verdict,) = verdicts(results)
    assert verdict.holds
    assert verdict.best.construction == "chain"
    assert last_line(results) == "trees: cells=3 ours_best_or_equal=1 behind=0"
    results[cell("block-verification", "chain")] = [3.2, 5.21, 4.19]
    (verdict,) = verdicts(results)
    assert not verdict.holds
    assert verdict.lead == pytest.approx((-0.2, 0.00577), abs=1e-4)
    assert last_line(results) == "trees: cells=4 ours_best_or_equal=0 behind=1"
    small = {at._replace(budget=4): values for at, values in results.items()}
    assert last_line(small).endswith("ours_best_or_equal=0 behind=0")  # too few nodes to be judged


def test_trees_chosen_by_value_and_drafters_without_q_are_not_held_against_q() -> None:
    assert taken("recursive-rejection", "sequoia", "mid")
    assert not taken("recursive-rejection", "opt-tree", "mid")
    assert not taken("recursive-rejection", "sequoia", "suffix index")
    assert not taken("block-verification", "k-ary", "mid")
    assert taken("typical-acceptance", "eagle-2", "suffix index")
    assert taken("shared-noise", "chain", "prompt lookup")
    assert not taken("shared-noise", "k-ary", "prompt lookup")


def test_a_quick_run_prints_its_tables_and_ends_with_its_line(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    app = command.typer.Typer()
    app.command()(command.main)
    flags = "--prompts 2 --taught 1 --roots 2 --noises 2 --drafts 2 --processes 1"
    flags += " --nodes 4 --nodes 8 --temperature 0 --temperature 1"
    drafters = ("drafter", "suffix index")
    chosen = [part for name in drafters for part in ("--drafter", name)]
    folders = [
        "--models",
        str(MODELS),
        "--texts",
        str(MODELS.parent / "examples" / "held_out.jsonl"),
        "--save",
        "quick",
    ]
    result = CliRunner().invoke(app, [*flags.split(), *chosen, *folders])
    assert result.exit_code == 0, result.output
    setting = Setting(drafters, (0.0, 1.0), (4, 8))
    count = len(list(cells_of(setting)))
    assert re.fullmatch(
        rf"trees: cells={count} ours_best_or_equal=\d+ behind=\d+", result.output.strip().splitlines()[-1]
    )
    saved = json.loads((tmp_path / "quick.json").read_text())
    lengths = {
        Cell(each["drafter"], each["temperature"], each["rule"], each["construction"], each["budget"]): each["mean"]
        for each in saved["cells"]
    }
    assert set(lengths) == set(cells_of(setting))
    for at, length in lengths.items():
        assert 1.0 <= length <= 1.0 + min(at.budget, 24)
        if at.temperature == 0 and at.rule == "target-match":  # greedy, the target's token is the same by both rules
            assert length == pytest.approx(lengths[at._replace(rule=SHARED_NOISE)])
    (row,) = [line for line in result.output.splitlines() if "recursive-rejection, opt-tree" in line][:1]
    assert row.split()[-2:] == ["-", "-"]


def test_a_drafter_that_does_not_exist_is_refused() -> None:
    app = command.typer.Typer()
    app.command()(command.main)
    result = CliRunner().invoke(app, ["--drafter", "oracle", "--models", str(MODELS)])
    assert result.exit_code != 0
    assert "must be one of" in result.output


def test_heads_and_other_models_are_drafters_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    shape = make_heads_config("eagle-3", read_config(MODELS / "target"), depth=2)
    save_network(tmp_path / "heads", shape, make_network(shape))
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    app = command.typer.Typer()
    app.command()(command.main)
    flags = "--prompts 2 --taught 1 --roots 2 --noises 2 --processes 1 --nodes 8 --temperature 1 --ours-alone"
    others = ["--also", f"heads={tmp_path / 'heads'}", "--also", f"middle={MODELS / 'mid'}", "--save", "others"]
    folders = ["--models", str(MODELS), "--texts", str(MODELS.parent / "examples" / "held_out.jsonl")]
    result = CliRunner().invoke(app, [*flags.split(), "--drafter", "mid", *others, *folders])
    assert result.exit_code == 0, result.output
    cells = json.loads((tmp_path / "others.json").read_text())["cells"]
    lengths = {each["drafter"]: each["mean"] for each in cells}
    assert lengths.keys() == {"mid", "heads", "middle"}
    assert lengths["middle"] == lengths["mid"]
    assert 1.0 <= lengths["heads"] < 3.0
    missing = CliRunner().invoke(app, [*flags.split(), "--also", f"none={tmp_path / 'none'}", *folders])
    assert missing.exit_code == 2
    assert "missing" in missing.output


def test_a_drafter_that_drafts_ahead_covers_the_new_root_after_two_levels_and_never_after_one() -> None:
    rows = PathRows(load(MODELS / "target"))
    contract = Contract(seed=7, max_tokens=64)
    text = TargetText(tuple(continued(rows, [1, 2, 3], contract, 60)), 3)

    def measured(rule: str, levels: int) -> ahead.Coverage:
        tree = ahead.AheadTree(rows, DrafterRates(), text, contract, ahead.Drafting(rule, 8, 4))
        return ahead.coverage(iter([tree]), levels, turns=rule == ahead.TURNS)

    assert measured(ahead.TURNS, 2).length == pytest.approx(3.0, abs=0.1)
    assert measured(ahead.AHEAD, 1).length == pytest.approx(1.0, abs=0.1)
    for rule in (ahead.AHEAD, ahead.UNDECIDED, ahead.KNOWN):  # the drafter is the target: its best path is the target's
        assert measured(rule, 2).covered == 1.0
        assert measured(rule, 2).length == pytest.approx(2.0, abs=0.1)


def test_the_last_level_expands_no_node_that_is_in_the_pass_where_undecided_ones_come_first() -> None:
    rows = PathRows(load(MODELS / "drafter"))
    contract = Contract(seed=7, max_tokens=64)
    text = TargetText(tuple(continued(rows, [1, 2, 3], contract, 60)), 3)
    for last in (False, True):
        tree = ahead.AheadTree(rows, DrafterRates(), text, contract, ahead.Drafting(ahead.UNDECIDED, 8, 4))
        tree.expand((), last=False)
        verified = tree.verified()
        assert verified
        assert tree.expand(verified, last=last) is not last  # the pass holds all nodes but the root
        assert any(node.expanded for node in verified) is not last
