"""Every sampling parameter means what `transformers` and OpenAI's API define, at every node of a tree."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from outrider.core.sampling import noise
from outrider.core.sampling.filters import FloatRow, best_of, keep_sampled, keep_top_p
from outrider.core.sampling.logprobs import pack
from outrider.core.sampling.noise import Draw, NoiseRows, generation_base, gumbel_row
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.errors import InvalidRequest

V = 24
PLAIN = Contract(seed=5, max_tokens=50)
tokens = st.integers(0, V - 1)

contracts = st.builds(
    Contract,
    seed=st.integers(0, 5),
    max_tokens=st.just(50),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.6, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.8, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 3.0]), max_size=3),
    allowed_ids=st.just(()) | st.lists(tokens, min_size=12, unique=True),
    banned_ids=st.lists(tokens, max_size=4),
    min_tokens=st.integers(0, 8),
    stop_ids=st.lists(tokens, max_size=3),
)


def slow_weights(logits: list[float], contract: Contract, prompt: list[int], answer: list[int]) -> list[float]:
    """log p up to a constant, one token at a time, as docs/protocol.md has it."""
    bias, everywhere, own = dict(contract.logit_bias), Counter(prompt + answer), Counter(answer)
    scores = []
    for token, logit in enumerate(logits):
        score = logit + bias.get(token, 0.0)
        if everywhere[token]:
            score = score * contract.repetition_penalty if score < 0 else score / contract.repetition_penalty
        if own[token]:
            score -= contract.presence_penalty + contract.frequency_penalty * own[token]
        banned = token in contract.banned_ids or (contract.allowed_ids and token not in contract.allowed_ids)
        if banned or (token in contract.stop_ids and len(answer) < contract.min_tokens):
            score = -math.inf
        scores.append(score)
    if contract.greedy:
        return scores
    scores = [score / contract.temperature for score in scores]
    if contract.top_k:
        kth = sorted(scores, reverse=True)[min(contract.top_k, len(scores)) - 1]
        scores = [score if score >= kth else -math.inf for score in scores]
    if contract.top_p < 1:
        best = max(scores)
        total = math.fsum(math.exp(score - best) for score in scores)
        reached, kept = 0.0, set()
        for token in sorted(range(len(scores)), key=lambda token: (-scores[token], token)):
            kept.add(token)
            reached += math.exp(scores[token] - best) / total
            if reached >= contract.top_p:
                break
        scores = [score if token in kept else -math.inf for token, score in enumerate(scores)]
    least = max(scores) + (math.log(contract.min_p) if contract.min_p else -math.inf)
    return [score if score >= least else -math.inf for score in scores]


@given(contracts, st.lists(tokens, min_size=1, max_size=12), st.lists(tokens, max_size=12), st.integers(0, 2**32 - 1))
def test_filters_equal_the_slow_reference(contract: Contract, prompt: list[int], answer: list[int], draw: int) -> None:
    logits = np.random.default_rng(draw).normal(0, 3, V).astype(np.float32)
    slow = slow_weights([float(x) for x in logits], contract, prompt, answer)
    assert Sampler(contract, V, prompt + answer, len(prompt)).log_weights(logits) == pytest.approx(slow, abs=1e-9)


@given(contracts, st.lists(tokens, min_size=1, max_size=9), st.lists(tokens, max_size=9), st.lists(tokens, max_size=9))
def test_a_node_is_sampled_as_if_its_path_had_been_committed(
    contract: Contract, prompt: list[int], answer: list[int], path: list[int]
) -> None:
    logits = np.random.default_rng(len(path)).normal(0, 3, V).astype(np.float32)
    sampler = Sampler(contract, V, prompt + answer, len(prompt))
    at_node = sampler.scores(logits, path)
    assert np.array_equal(sampler.scores(logits, path), at_node)  # asking changes nothing
    sampler.extend(path)
    assert np.array_equal(sampler.scores(logits), at_node)
    afresh = Sampler(contract, V, prompt + answer + path, len(prompt))
    assert np.array_equal(afresh.scores(logits), at_node)


PROMPT, ANSWER = [3, 7, 7, 11, 2], [7, 5, 5, 19]
TEXT = torch.tensor([PROMPT + ANSWER])


@pytest.mark.parametrize(
    ("change", "processors"),
    [
        ({"repetition_penalty": 1.4}, [theirs.RepetitionPenaltyLogitsProcessor(1.4)]),
        ({"repetition_penalty": 2.0}, [theirs.RepetitionPenaltyLogitsProcessor(2.0)]),
        ({"repetition_penalty": 0.6}, [theirs.RepetitionPenaltyLogitsProcessor(0.6)]),
        ({"logit_bias": {4: 2.5, 9: -3.0}}, [theirs.SequenceBiasLogitsProcessor([[[4], 2.5], [[9], -3.0]])]),
        ({"banned_ids": (1, 6, 8)}, [theirs.SuppressTokensLogitsProcessor([1, 6, 8])]),
        (
            {"allowed_ids": (0, 2, 5, 9, 12, 21)},
            [theirs.PrefixConstrainedLogitsProcessor(lambda *_: [0, 2, 5, 9, 12, 21], 1)],
        ),
        (
            {"min_tokens": 5, "stop_ids": (6, 20)},
            [theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, [6, 20])],
        ),
        (
            {"min_tokens": 4, "stop_ids": (6, 20)},
            [theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, [6, 20])],
        ),
        (
            {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.15},
            [
                theirs.TemperatureLogitsWarper(0.7),
                theirs.TopKLogitsWarper(9),
                theirs.TopPLogitsWarper(0.8),
                theirs.MinPLogitsWarper(0.15),
            ],
        ),
        (
            {
                "logit_bias": {4: 2.5, 7: -3.0},
                "repetition_penalty": 1.3,
                "banned_ids": (1,),
                "min_tokens": 9,
                "stop_ids": (6,),
                "temperature": 1.2,
                "top_k": 12,
                "top_p": 0.9,
                "min_p": 0.02,
            },
            [
                theirs.SequenceBiasLogitsProcessor([[[4], 2.5], [[7], -3.0]]),
                theirs.RepetitionPenaltyLogitsProcessor(1.3),
                theirs.SuppressTokensLogitsProcessor([1]),
                theirs.MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, [6]),
                theirs.TemperatureLogitsWarper(1.2),
                theirs.TopKLogitsWarper(12),
                theirs.TopPLogitsWarper(0.9),
                theirs.MinPLogitsWarper(0.02),
            ],
        ),
    ],
    ids=[
        "repetition",
        "doubled",
        "encouraged",
        "bias",
        "banned",
        "allowed",
        "too short",
        "long enough",
        "warpers",
        "all",
    ],
)
def test_penalties_and_filters_equal_the_processors_of_transformers(
    change: dict[str, Any], processors: list[Any]
) -> None:
    sampler = Sampler(replace(PLAIN, **change), V, PROMPT + ANSWER, len(PROMPT))
    generator = np.random.default_rng(3)
    for _ in range(50):
        logits = generator.normal(0, 3, V).astype(np.float32)
        expected = torch.from_numpy(logits.astype(np.float64))[None]
        for processor in processors:
            expected = processor(TEXT, expected)
        assert sampler.log_weights(logits) == pytest.approx(expected[0].numpy(), abs=1e-6)


def test_presence_counts_once_and_frequency_each_time_in_the_answer_alone() -> None:
    logits = np.zeros(V, np.float32)
    contract = replace(PLAIN, presence_penalty=0.5, frequency_penalty=0.2)
    scores = Sampler(contract, V, PROMPT + ANSWER, len(PROMPT)).log_weights(logits)
    assert scores[[7, 5, 19, 3, 0]] == pytest.approx([-0.7, -0.9, -0.7, 0.0, 0.0])


def test_the_lowest_id_wins_a_tie_and_the_gap_is_the_lead() -> None:
    greedy = Sampler(Contract(seed=0, max_tokens=1, temperature=0.0), 4, [0], 1)
    assert greedy.choose(np.array([1, 3, 3, 0], dtype=np.float32))[:2] == (1, 0.0)
    assert greedy.choose(np.array([1, 3, 2.5, 0], dtype=np.float32))[:2] == (1, 0.5)
    only = Sampler(Contract(seed=0, max_tokens=1, top_k=1), 4, [0], 1)
    assert only.choose(np.array([1, 3, 2.5, 0], dtype=np.float32))[:2] == (1, math.inf)


@pytest.mark.parametrize(
    "change",
    [
        {"allowed_ids": (1, 2), "banned_ids": (2, 1)},
        {"banned_ids": tuple(range(V))},
        {"allowed_ids": (3,), "stop_ids": (3,), "min_tokens": 1},
        {"allowed_ids": (V,)},
        {"banned_ids": (V,)},
        {"logit_bias": {V: 1.0}},
        {"stop_ids": (V,)},
    ],
)
def test_contracts_that_leave_no_token_of_the_vocabulary_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        replace(PLAIN, **change).check_vocabulary(V)
    replace(PLAIN, allowed_ids=(3,), stop_ids=(3,)).check_vocabulary(V)
    replace(PLAIN, allowed_ids=(V - 1, V - 2)).check_vocabulary(V, V - 1)
    with pytest.raises(InvalidRequest, match="no token to choose"):
        replace(PLAIN, allowed_ids=(V - 1,)).check_vocabulary(V, V - 1)


@given(contracts, st.lists(st.integers(0, V + 9), min_size=1, max_size=12), st.lists(st.integers(0, V + 9), max_size=3))
def test_ids_outside_the_vocabulary_do_not_change_the_others(
    contract: Contract, text: list[int], path: list[int]
) -> None:
    """Neither in the text nor in what the contract names."""
    foreign = [*range(V, V + 10)]
    wider = replace(
        contract,
        logit_bias=(*contract.logit_bias, *((id_, 5.0) for id_ in foreign)),
        allowed_ids=(*contract.allowed_ids, *foreign) if contract.allowed_ids else (),
        banned_ids=(*contract.banned_ids, *foreign[:3]),
        stop_ids=(*contract.stop_ids, *foreign[3:]),
    )
    assume(contract.allows_any(V))
    logits = np.random.default_rng(len(text)).normal(0, 2, V).astype(np.float32)
    ours = Sampler(wider, V, text[:-1], 0)
    ours.extend(text[-1:])
    padded = np.concatenate([logits, np.full(10, -np.inf, np.float32)])
    plain = Sampler(contract, V + 10, text, 0)  # this sampler has all ids, and its model never chooses the further ones
    assert np.array_equal(ours.scores(logits, path), plain.scores(padded, path)[:V])
    assert wider.allows_any(V)
    assert not replace(contract, allowed_ids=foreign, banned_ids=(), stop_ids=()).allows_any(V)


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        ({}, True),
        ({"temperature": 0.3}, True),
        ({"temperature": 0.0, "top_k": 2}, True),  # a filter changes no argmax
        ({"top_k": 2}, False),
        ({"banned_ids": (1,)}, False),
        ({"temperature": 0.0, "banned_ids": (1,)}, False),
        ({"presence_penalty": 0.5}, False),
        ({"logprobs": 0}, False),
    ],
)
def test_a_draw_of_seed_and_temperature_suffices_where_no_other_setting_counts(
    change: dict[str, Any], plain: bool
) -> None:
    contract = replace(PLAIN, choice=3, **change)
    expected = Draw(generation_base(5, 3), contract.temperature) if plain else None
    assert Sampler(contract, V, PROMPT, len(PROMPT)).draw(restricts=False) == expected


def test_min_tokens_keeps_a_draw_from_being_seed_and_temperature_alone() -> None:
    sampler = Sampler(replace(PLAIN, min_tokens=2, stop_ids=(6,)), V, PROMPT, len(PROMPT))
    for _ in range(2):
        assert sampler.draw(restricts=False) is None
        sampler.extend([1])
    assert sampler.draw(restricts=False) is not None
    sampler = Sampler(replace(PLAIN, min_tokens=2, stop_ids=(V,)), V, PROMPT, len(PROMPT))
    assert sampler.draw(restricts=False) is not None


def test_prepared_noise_is_computed_once_and_dropped_below_the_committed_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed: list[int] = []

    def counted(seed: int, choice: int, position: int, vocabulary: int) -> FloatRow:
        computed.append(position)
        return gumbel_row(seed, choice, position, vocabulary)

    monkeypatch.setattr(noise, "gumbel_row", counted)
    sampler, dropped = Sampler(PLAIN, V, PROMPT, len(PROMPT), compiled=False), list[int]()
    forget_below = NoiseRows.forget_below
    monkeypatch.setattr(NoiseRows, "forget_below", lambda rows, position: dropped.append(position))
    for position in (5, 6, 7):
        sampler.prepare(position)
    np.testing.assert_array_equal(sampler.scores(np.zeros(V, np.float32), [1]), gumbel_row(5, 0, 6, V))
    assert computed == [5, 6, 7]
    sampler.extend([1])
    assert dropped == [6]
    rows = NoiseRows.of(PLAIN, V)
    for position in (5, 6):
        rows.row(position)
    forget_below(rows, 6)
    for position in (5, 6):
        rows.row(position)
    assert computed == [5, 6, 7, 5, 6, 5]


def test_a_token_at_a_node_is_chosen_by_the_noise_of_its_position() -> None:
    sampler, flat = Sampler(PLAIN, V, PROMPT, len(PROMPT)), np.zeros(V, np.float32)
    best = [int(gumbel_row(5, 0, position, V).argmax()) for position in (5, 6, 7)]
    assert len(set(best)) == 3
    assert [sampler.choose(flat, path).token for path in ([], [1], [1, 2])] == best


def test_log_probabilities_are_of_the_token_that_was_chosen() -> None:
    logits = np.arange(V, dtype=np.float32)
    chosen = Sampler(replace(PLAIN, logprobs=3), V, PROMPT, len(PROMPT)).choose(logits)
    assert chosen.logprobs == pack(logits, chosen.token, 3)
    assert Sampler(PLAIN, V, PROMPT, len(PROMPT)).choose(logits).logprobs == b""


def test_probabilities_sum_to_one_and_greedy_ones_are_one_hot() -> None:
    logits = np.array([0.0, 2.0, 2.0, 1.0], np.float32)
    warm = Sampler(replace(PLAIN, banned_ids=(3,)), 4, [0], 1).probabilities(logits)
    assert warm == pytest.approx(np.array([1.0, math.exp(2), math.exp(2), 0.0]) / (1 + 2 * math.exp(2)))
    assert Sampler(replace(PLAIN, temperature=0.0), 4, [0], 1).probabilities(logits).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_probabilities_follow_the_nodes_path_and_stay_finite_for_large_logits() -> None:
    logits = np.array([800.0, 799.0], np.float32)
    sampler = Sampler(replace(PLAIN, presence_penalty=1.0), 2, [0], 1)
    assert sampler.probabilities(logits) == pytest.approx([math.e / (1 + math.e), 1 / (1 + math.e)])
    assert sampler.probabilities(logits, [0]) == pytest.approx([0.5, 0.5])


def test_top_p_prefers_lower_ids_among_equal_scores_and_keeps_all_if_needed() -> None:
    scores = np.where(np.arange(1000) % 3 == 0, -50.0, 0.0)
    alike = np.flatnonzero(scores == 0.0)
    keep_top_p(scores, 0.5)
    assert np.flatnonzero(scores == 0.0).tolist() == alike[:333].tolist()
    both = np.zeros(2)
    keep_top_p(both, 0.9)
    assert both.tolist() == [0.0, 0.0]
    large = np.array([900.0, 0.0, 899.0])  # their exponentials are not finite
    keep_top_p(large, 0.9)
    assert large.tolist() == [900.0, -math.inf, 899.0]


@given(st.integers(0, 2**32), st.integers(1, 300), st.integers(0, 310), st.sampled_from([np.float32, np.float64]))
def test_the_best_are_in_order_of_scores_then_ids_without_any_that_may_not_be_chosen(
    seed: int, size: int, count: int, kind: type[np.floating[Any]]
) -> None:
    dice = np.random.default_rng(seed)
    scores = dice.choice(np.array([-np.inf, -1.0, 0.0, 0.5, 2.0], kind), size)
    best, theirs = best_of(scores, count)
    expected = sorted((token for token in range(size) if scores[token] > -np.inf), key=lambda it: (-scores[it], it))
    assert best.tolist() == expected[:count]
    assert theirs.tolist() == [scores[token] for token in best]
    assert theirs.dtype == kind


def test_the_leading_tokens_at_a_node_follow_its_path() -> None:
    contract = replace(PLAIN, presence_penalty=5.0)
    sampler = Sampler(contract, V, [1, 2], 1, compiled=False)
    logits = np.zeros(V, np.float32)
    logits[[3, 7]] = 2.0, 1.0
    for noised in (False, True):
        weights = sampler.scores(logits, [3]) if noised else sampler.log_weights(logits, [3])
        tokens, scores = sampler.leading(logits, [3], V, noised=noised)
        assert tokens.tolist() == np.argsort(-weights, kind="stable").tolist()
        assert scores.tolist() == weights[tokens].tolist()
    assert sampler.leading(logits, [3], 1, noised=False)[0].tolist() == [7]


def test_a_row_of_nans_gives_an_allowed_token() -> None:
    contract = replace(PLAIN, stop_ids=(0,), min_tokens=2)
    sampler, nothing = Sampler(contract, V, [1, 2], 1, compiled=False), np.full(V, np.nan, np.float32)
    for path, token in (([], 1), ([5], 0)):  # the answer has a token; with two it may stop
        found = sampler.choose(nothing, path)
        assert found.token == token
        assert math.isnan(found.gap)


def test_a_top_p_of_one_leaves_out_nothing_however_unlikely() -> None:
    logits = np.array([0.0, -200.0, 3.0], np.float32)
    assert np.isfinite(Sampler(PLAIN, 3, [0], 1).log_weights(logits)).all()
    assert np.isfinite(Sampler(replace(PLAIN, top_p=0.99), 3, [0], 1).log_weights(logits)).sum() == 2


@pytest.mark.parametrize("k", [1, 2, 4])
def test_top_k_keeps_the_best_k_and_nothing_else(k: int) -> None:
    scores = np.array([0.5, 3.0, -1.0, 2.0, 1.0])
    keep_sampled(scores, Contract(seed=1, max_tokens=1, top_k=k))
    assert np.flatnonzero(np.isfinite(scores)).tolist() == sorted([1, 3, 4, 0][:k])
