"""What the device chooses under filters, a bias and bans is what the sampler chooses on the host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.core.sampling.logprobs import unpack
from outrider.core.sampling.noise import noise_keys
from outrider.core.sampling.restriction import Restriction
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import MAX_LOGPROBS, Contract
from outrider.engine.device.device_logits import DeviceLogits
from outrider.engine.device.restrictions import (
    DEPTH,
    ENTRIES,
    OUTPUTS,
    RestrictionBuffers,
    choose_restricted,
    likeliest,
)
from outrider.engine.device.sampling import noise_steps
from tests.engine.device.taped import DEVICE

ON = torch.device(DEVICE)
VOCABULARY = 311
CONTRACTS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": VOCABULARY + 9},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.02},
    {"banned_ids": (0, 3, 5, VOCABULARY + 2)},
    {"allowed_ids": (7, 9, 200), "logit_bias": {9: 2.0, 11: 50.0}, "banned_ids": (200,)},
    {"logit_bias": {3: 8.0, 4: -100.0, VOCABULARY + 2: 5.0}},
    {"logit_bias": {3: 8.0}, "banned_ids": (4,), "top_p": 0.8, "temperature": 0.7},
    {"logit_bias": {3: 8.0}, "temperature": 0.0, "top_k": 2},
    {},
]


def contract_of(terms: dict[str, Any], seed: int = 4) -> Contract:
    return Contract(**{"seed": seed, "max_tokens": 9, "temperature": 1.3} | terms)


def chosen(contracts: list[Contract], logits: NDArray[np.float32], count: int = 2) -> torch.Tensor:
    """Choices after one row of logits of each contract's text, which has one token."""
    draws = [Sampler(contract, logits.shape[1], [1], 0).draw(restricts=True) for contract in contracts]
    assert all(draw is not None for draw in draws)
    buffers = RestrictionBuffers(ON)
    assert buffers.send([draw and draw.restriction for draw in draws]).all()
    keys = noise_keys(np.array([draw and draw.base for draw in draws], np.uint64), np.ones(len(draws), np.int64))
    return choose_restricted(
        torch.from_numpy(logits).to(ON),
        torch.from_numpy(keys.view(np.int64)).to(ON),
        torch.tensor([contract.temperature for contract in contracts], dtype=torch.float64, device=ON),
        buffers.inputs(len(draws)),
        noise_steps(logits.shape[1], ON),
        count,
    ).cpu()


def test_tokens_and_gaps_are_the_samplers_over_many_rows_of_all_contracts() -> None:
    random = np.random.default_rng(3)
    left = total = 0
    for turn in range(40):
        contracts = [contract_of(terms, seed=turn * 100 + index) for index, terms in enumerate(CONTRACTS)]
        logits = (random.standard_normal((len(contracts), VOCABULARY)) * random.choice([0.5, 3.0])).astype(np.float32)
        if turn % 3 == 0:
            logits = np.round(logits)  # ties
        if turn % 5 == 0:
            logits[:, 290:] = -np.inf  # padding
        for contract, row, found in zip(contracts, logits, chosen(contracts, logits), strict=True):
            total += 1
            first, second = found[2:]
            if math.isnan(first):
                left += 1
                continue
            expected = Sampler(contract, VOCABULARY, [1], 0, compiled=False).choose(row)
            assert int(found[0]) == expected.token
            assert float(first - second) == pytest.approx(expected.gap, abs=1e-9)
    assert left < total / 10  # ties at a bound


def test_candidates_are_those_of_the_sampler() -> None:
    random = np.random.default_rng(3)
    contracts = [contract_of(terms) for terms in CONTRACTS]
    logits = (random.standard_normal((len(contracts), VOCABULARY)) * 3).astype(np.float32)
    for contract, row, found in zip(contracts, logits, chosen(contracts, logits, 32), strict=True):
        tokens, scores = Sampler(contract, VOCABULARY, [1], 0).leading(row, (), 32)
        known = torch.isfinite(found[32:])
        assert found[:32][known].long().tolist() == tokens.tolist()
        assert found[32:][known].tolist() == pytest.approx(scores.tolist(), abs=1e-9)


@pytest.mark.parametrize("wanted", [0, 5, MAX_LOGPROBS])
def test_log_probabilities_are_the_sampler_s(wanted: int) -> None:
    random = np.random.default_rng(3)
    rows, contract = 40, contract_of({"logprobs": wanted, "top_k": 5})
    logits = (random.standard_normal((rows, VOCABULARY)) * 3).astype(np.float32)
    logits[:8] = np.round(logits[:8])  # ties
    logits[9, 3:] = -np.inf
    choices = chosen([contract] * rows, logits)
    likely = likeliest(torch.from_numpy(logits).to(ON), choices[:, 0].long().to(ON))
    ours = DeviceLogits(VOCABULARY, [rows])
    whole = np.ones(rows, np.bool_)
    ours.add(np.arange(rows), whole, torch.from_numpy(logits), choices, likely, [contract.logprobs] * rows)
    ours.fetch()
    left = 0
    for row in range(rows):
        found, expected = ours.choice(row), Sampler(contract, VOCABULARY, [1], 0).choose(logits[row])
        if found is None:
            left += 1
            continue
        (one,), (other,) = unpack(found.logprobs, wanted), unpack(expected.logprobs, wanted)
        assert (found.token, one.top_ids) == (expected.token, other.top_ids)
        assert [one.logprob, *one.top_logprobs] == pytest.approx([other.logprob, *other.top_logprobs], rel=1e-6)
    assert left <= 8


def test_what_cannot_be_certain_is_left_to_the_host() -> None:
    wide = np.zeros((1, DEPTH + 50), np.float32)  # all alike: the filters keep more than is looked at, or cut a tie
    for terms in ({"top_p": 0.99}, {"min_p": 0.5}, {"top_k": 3}, {"top_k": DEPTH + 9}, {"top_p": 0.1}):
        assert torch.isnan(chosen([contract_of(terms)], wide)[0, 2]), terms
    halves = np.array([[0.0, 0.0, -np.inf, -np.inf]], np.float32)  # half of the probability is reached by the first
    assert torch.isnan(chosen([contract_of({"top_p": 0.5})], halves)[0, 2])
    single = np.array([[0.0, 5.0, -np.inf]], np.float32)
    found = chosen([contract_of({"top_p": 0.5})], single)[0]
    assert (int(found[0]), float(found[3])) == (1, -math.inf)


def test_rows_whose_lists_do_not_fit_are_left_to_the_host() -> None:
    long = Restriction.of(contract_of({"banned_ids": tuple(range(4000))}), 5000)
    buffers = RestrictionBuffers(ON)
    fitting = ENTRIES // 4000
    sent = [*[long] * fitting, None, long, None]
    assert buffers.send(sent).tolist() == [True] * fitting + [True, False, True]
    entries = buffers.inputs(len(sent)).entries.cpu()
    assert entries[0, fitting * 4000 :].tolist() == [OUTPUTS] * (ENTRIES - fitting * 4000)
    buffers.send([None])
    assert (buffers.inputs(1).entries[0] == OUTPUTS).all()


@pytest.mark.parametrize(
    "terms",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"min_tokens": 2, "stop_ids": (0,)},
    ],
)
def test_contracts_that_ask_for_more_are_left_to_the_sampler(terms: dict[str, Any]) -> None:
    assert Sampler(contract_of(terms), 8, [1, 2], 2).draw(restricts=True) is None


def test_an_engine_without_restrictions_gets_no_such_draw() -> None:
    for terms in CONTRACTS:
        sampler = Sampler(contract_of(terms), VOCABULARY, [1], 0)
        draw = sampler.draw(restricts=False)
        assert (draw is None) is bool(terms)
        assert sampler.draw(restricts=True) is not None
