"""Growth goes where the chance is, scores learn from the target, and budget and wait maximise goodput."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.core.construction.expansion import (
    LOWEST_SCORE,
    SCALES,
    DrafterFits,
    ScaleFit,
    candidates,
    floor_score,
    frontier,
    propose,
)
from outrider.core.construction.self_repetition import Hint
from outrider.core.control.cost.budget import COST, CostModel, choose_budget
from outrider.core.control.holds.arrival_model import HOLDS, ArrivalPatterns, Arrivals, hold_seconds, pays
from outrider.core.sampling.noise import gumbel_row
from outrider.core.session.contract import Plan
from outrider.core.tree.token_tree import TokenTree


def test_candidates_are_the_best_by_log_q_plus_noise() -> None:
    logits = np.random.default_rng(0).normal(0, 2, 500).astype(np.float32)
    noise = gumbel_row(3, 0, 4, 500)
    row = candidates(logits + noise)
    assert row.tokens.tolist() == np.argsort(-(logits + noise))[:64].tolist()
    noise[5:] = -np.inf
    assert len(candidates(logits + noise).tokens) == 5


def test_a_row_without_a_possible_token_gives_no_edges_and_changes_no_fit() -> None:
    fit, row, hint = DrafterFits(), candidates(np.full(500, -np.inf, np.float32)), Hint(7, 3)
    assert fit.edges(row, 4, None) == fit.edges(row, 4, hint) == []
    assert max(fit.rescore(row, (7, 8), hint)) < math.log(LOWEST_SCORE)
    fit.observe(row, 7, hint)
    assert (fit.compared, fit.scale.scale) == (0, ScaleFit().scale)


def test_the_noise_scale_grows_with_wrong_drafts_and_shrinks_with_right_ones() -> None:
    generator = np.random.default_rng(1)
    good, bad = ScaleFit(), ScaleFit()
    for position in range(300):
        q = generator.normal(0, 2, 100).astype(np.float32)
        noise = gumbel_row(5, 0, position, 100)
        row = candidates(q + noise)
        good.observe(row, int((q + noise + generator.normal(0, 0.1, 100)).argmax()))
        bad.observe(row, int((q + noise + generator.normal(0, 2.0, 100)).argmax()))
    assert good.scale < bad.scale
    assert {good.scale, bad.scale} <= set(SCALES)


def test_scores_are_calibrated_when_the_disagreement_is_gumbel() -> None:
    """Where target and draft differ by Gumbel noise of scale s, the fitted chances are the frequencies."""
    generator = np.random.default_rng(6)
    fit = DrafterFits()
    hits, predicted = [], []
    for position in range(1500):
        q = generator.normal(0, 2, 50).astype(np.float32)
        noise = gumbel_row(9, 0, position, 50)
        row = candidates(q + noise)
        truth = int((q + noise + 0.5 * generator.gumbel(size=50)).argmax())
        if position >= 300:
            hits.append(int(row.tokens[0]) == truth)
            predicted.append(np.exp(fit.edges(row, 1, None)[0][1]))
        fit.observe(row, truth, None)
    assert np.mean(predicted) == pytest.approx(np.mean(hits), abs=0.04)


def grown(plan: Plan, levels: int, min_path_score: float = 0.0, *, ahead: bool = False) -> TokenTree:
    generator = np.random.default_rng(7)
    tree, fit = TokenTree([1]), DrafterFits()
    for _ in range(levels):
        for node in frontier(tree, plan, min_path_score, 4, ahead=ahead):
            logits = generator.normal(0, 2, 60).astype(np.float32)
            row = candidates(logits + gumbel_row(3, 0, node.position + 1, 60))
            propose(tree, node, fit.edges(row, plan.width, None), floor_score(min_path_score, ahead=ahead))
    return tree


def test_growth_obeys_depth_width_and_min_path_score() -> None:
    plan = Plan(depth=3, width=2, nodes=100)
    tree = grown(plan, 12)
    nodes = [node for _, node in tree.best_first(depth=100, width=100)]
    assert max(tree.depth(node) for node in nodes) == 3
    assert max(len(node.children) for node in [tree.root, *nodes]) == 2
    dear = grown(plan, 12, min_path_score=0.2)
    assert 0 < dear.size < tree.size
    assert min(score for score, _ in dear.best_first(depth=9, width=9)) >= 0.2 * 0.9
    assert frontier(TokenTree([1]), Plan(depth=0), 0.0, 4) == []


def test_a_tree_that_is_not_drafted_ahead_stops_growing_at_the_size_of_a_step() -> None:
    held = grown(Plan(depth=20, width=2, nodes=6), 60)
    free = grown(Plan(depth=20, width=2, nodes=6), 60, ahead=True)
    assert held.size < free.size
    best = [node for _, node in itertools.islice(held.best_first(depth=19, width=2), 6)]
    assert all(node.expanded for node in best)


costs = st.lists(st.floats(1e-3, 5e-2), min_size=6, max_size=6).map(
    lambda values: CostModel(list(zip((1, 2, 4, 8, 16, 32), values, strict=True)))
)


@given(st.lists(st.floats(1e-3, 1.0), max_size=24), st.integers(1, 8), costs)
def test_the_node_budget_maximizes_goodput(scores: list[float], sessions: int, cost: CostModel) -> None:
    ranked = sorted(scores, reverse=True)
    budget = choose_budget(ranked, sessions, sessions, cost)

    def goodput(count: int) -> float:
        return (sessions + sum(ranked[:count])) / (cost.seconds(sessions + count) + COST.overhead_s)

    assert goodput(budget.nodes) >= max(goodput(count) for count in range(len(ranked) + 1)) * (1 - 1e-9)
    assert 0.0 <= budget.min_path_score <= 1.0


def test_the_cost_never_falls_with_more_tokens_and_follows_measured_steps() -> None:
    cost = CostModel([(1, 0.010), (8, 0.009), (16, 0.020)])
    assert cost.seconds(1) == cost.seconds(8) == pytest.approx(0.010)
    assert cost.seconds(12) == pytest.approx(0.015)
    assert cost.seconds(32) == pytest.approx(0.040)
    for _ in range(200):
        cost.observe(16, 0.030)
    assert cost.seconds(16) == pytest.approx(0.030, rel=0.02)
    cost.observe(16, 10.0)
    assert cost.seconds(16) < 0.033


def replay(delays: list[float], gains: list[float], seconds: float) -> float:
    """Teaches Arrivals a fixed pattern, then returns how long it waits in all when the pattern holds."""
    arrivals = Arrivals(ArrivalPatterns())
    now = 0.0
    for _ in range(60):
        now += 1.0
        arrivals.restart(now, 1.0)
        expected = 1.0
        for delay, gain in zip(delays, gains, strict=True):
            now += delay
            expected += gain
            arrivals.arrived(now, expected, passing=False)
        arrivals.wait(trial=False)  # for one more, which does not come
    for _ in range(2):  # a trial may be due; it brings what it always brings
        now += 1.0
        arrivals.restart(now, 1.0)
        if hold_seconds([arrivals], now, seconds, 1.0 / seconds):
            arrivals.arrived(now + delays[0], 1.0 + gains[0], passing=False)
    now += 1.0
    arrivals.restart(now, 1.0)
    waited, expected = 0.0, 1.0
    for delay, gain in zip(delays, gains, strict=True):
        if not pays([arrivals], now + waited, expected / (seconds + waited)):
            break
        waited += delay
        expected += gain
        arrivals.arrived(now + waited, expected, passing=False)
    return waited


@given(
    st.lists(st.tuples(st.floats(1e-3, 2e-2), st.floats(0.0, 1.0)), min_size=1, max_size=6),
    st.floats(5e-3, 5e-2),
)
@example([(0.0078, 1.0), (0.0078, 0.5), (0.0195, 0.5), (0.0195, 0.5), (0.0078, 1.0)], 0.039)
def test_the_wait_maximizes_the_rate_of_tokens(pattern: list[tuple[float, float]], seconds: float) -> None:
    delays, gains = [delay for delay, _ in pattern], [gain for _, gain in pattern]
    waited = replay(delays, gains, seconds)
    rates = {
        sum(delays[:count]): (1 + sum(gains[:count])) / (seconds + sum(delays[:count]))
        for count in range(len(delays) + 1)
    }
    assert rates[waited] >= max(rates.values()) * 0.99


def test_a_drafter_that_no_longer_sends_is_waited_for_ever_more_seldom() -> None:
    arrivals = Arrivals(ArrivalPatterns())
    for now in range(10):
        arrivals.restart(float(now), 1.0)
        arrivals.arrived(now + 0.01, 3.0, passing=False)
    arrivals.restart(20.0, 1.0)
    assert 0.0 < hold_seconds([arrivals], 20.0, 0.02, 1.0 / 0.02) <= 0.021
    assert hold_seconds([arrivals], 20.03, 0.05, 1.0 / 0.05) == 0.0
    waits = []
    for now in range(21, 300):
        arrivals.restart(float(now), 1.0)
        waits.append(hold_seconds([arrivals], float(now), 0.02, 1.0 / 0.02) > 0.0)
    assert sum(waits[:100]) > sum(waits[100:]) > 0
    assert sum(waits[100:]) <= 5


def test_a_drafter_whose_deltas_arrive_during_passes_gets_its_trial() -> None:
    arrivals = Arrivals(ArrivalPatterns())
    for now in range(1, HOLDS.retry_steps[0] + 1):
        arrivals.restart(float(now), 1.0)
        assert hold_seconds([arrivals], float(now), 0.02, 1.0 / 0.02) == pytest.approx(0.02)
        arrivals.arrived(now + 0.5, 3.0, passing=True)
        assert hold_seconds([arrivals], now + 0.6, 0.02, 3.0 / 0.02) == 0.0


def test_the_first_delta_of_a_subscription_does_not_count_for_later_delays() -> None:
    arrivals = Arrivals(ArrivalPatterns())
    arrivals.restart(0.0, 1.0)
    arrivals.start()
    arrivals.arrived(5.0, 2.0, passing=False)  # it had a long prompt to read
    arrivals.restart(6.0, 1.0)
    arrivals.arrived(6.005, 2.0, passing=False)
    arrivals.restart(7.0, 1.0)
    assert hold_seconds([arrivals], 7.0, 0.02, 1.0 / 0.02) == pytest.approx(0.01)


def test_a_levels_gain_is_the_score_that_usual_children_add_above_the_threshold() -> None:
    fits = DrafterFits()
    row = candidates(np.array([3.0, 2.0, 0.0, -9.0]))
    for _ in range(400):
        usual = [math.exp(edge) for _, edge in fits.edges(row, 3, None)]
    scores, min_path_score = [1.0, 0.3], 0.05
    expected = sum(max(0.0, score * chance - min_path_score) for score in scores for chance in usual[:2])
    assert fits.gain(scores, 2, min_path_score) == pytest.approx(expected, rel=1e-6)
    assert fits.gain(scores, 2, 1.0) == 0.0


def test_a_wait_must_pay_for_all_sessions_of_the_step() -> None:
    """A wait that pays for a session alone does not pay when others stand by, and pays again when they gain as well."""

    def taught(gain: float) -> Arrivals:
        arrivals = Arrivals(ArrivalPatterns())
        for now in range(50):
            arrivals.restart(float(now), 1.0)
            arrivals.arrived(now + 0.01, 1.0 + gain, passing=False)
        arrivals.restart(50.0, 1.0)
        return arrivals

    one = taught(0.8)
    assert pays([one], 50.0, 1.0 / 0.02)
    assert not pays([one], 50.0, 8.0 / 0.03)
    assert pays([taught(0.8) for _ in range(8)], 50.0, 8.0 / 0.03)


def test_deltas_that_stop_arriving_are_no_longer_waited_for() -> None:
    patterns = ArrivalPatterns()
    arrivals = Arrivals(patterns)
    arrivals.arrived(0.0, 1.0, passing=False)
    for deltas in [4] * 20 + [1] * 20:
        arrivals.restart(0.0, 1.0)
        for delta in range(deltas):
            arrivals.arrived(0.01 * (delta + 1), 2.0 + delta, passing=False)
        arrivals.wait(trial=False)
        arrivals.restart(0.1, 1.0)
    first, *others = (delta["gain_tokens"] for delta in patterns.fresh.estimates())
    assert first == pytest.approx(1.0)
    assert all(gain < 0.1 for gain in others)


def test_a_chunk_of_a_prompt_is_worth_the_tokens_that_could_be_decoded_meanwhile() -> None:
    cost = CostModel([(1, 0.01), (8, 0.01), (16, 0.02), (128, 0.16)])
    assert cost.in_tokens(8, 0) == 0.0
    assert cost.in_tokens(8, 8) == pytest.approx(8.0)
    assert cost.in_tokens(0, 128) == pytest.approx(15.0)
    scores = [0.95, 0.6, 0.5, 0.4]
    blind, aware = (choose_budget(scores, 4 + 124, 4.0 + worth, cost) for worth in (0.0, cost.in_tokens(4, 124)))
    assert (blind.nodes, aware.nodes) == (4, 3)  # a row takes the time of half a token
    assert blind.min_path_score < 0.1
    assert aware.min_path_score == pytest.approx(0.5, rel=0.01)
