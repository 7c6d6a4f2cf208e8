"""What the device chooses under filters, a bias and bans is what the sampler chooses on the host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.core.sampling.logprobs import unpack
from outrider.core.sampling.noise import Draw, generation_base, noise_keys
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import MAX_LOGPROBS, Contract
from outrider.engine.gpu.sampling.device_logits import DeviceLogits
from outrider.engine.gpu.sampling.penalties import PATH_TOKENS, PenaltyBuffers
from outrider.engine.gpu.sampling.restricted_rows import RestrictedRow
from outrider.engine.gpu.sampling.restrictions import (
    DEPTH,
    ENTRIES,
    OUTPUTS,
    RestrictionBuffers,
    choose_restricted,
    likeliest,
)
from outrider.engine.gpu.sampling.sampling import noise_steps
from outrider.engine.interface.batch import Segment
from tests.engine.gpu.taped import DEVICE

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
    {"min_tokens": 1, "stop_ids": (2, 5, VOCABULARY + 1), "logit_bias": {2: 30.0}, "temperature": 0.4},
    {},
]
PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "temperature": 0.0},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "presence_penalty": 0.3, "top_p": 0.9},
    {"repetition_penalty": 1.2, "logit_bias": {3: 8.0}, "banned_ids": (4,), "top_k": 40},
]
TEXT = [1, 3, 3, 7, VOCABULARY + 4, 9, 3, 9]  # the answer begins behind the first five


def contract_of(terms: dict[str, Any], seed: int = 4) -> Contract:
    return Contract(**{"seed": seed, "max_tokens": 9, "temperature": 1.3} | terms)


def row_of(draw: Draw, slot: int, length: int = 1) -> RestrictedRow | None:
    """The row behind a text of `length` tokens."""
    if draw.restriction is None:
        return None
    return RestrictedRow(draw.restriction, slot, length, np.empty(0, np.int64))


def chosen(contracts: list[Contract], logits: NDArray[np.float32], count: int = 2) -> torch.Tensor:
    """Choices after one row of logits of each contract's text, which has one token."""
    draws = [Sampler(contract, logits.shape[1], [1], 1).draw(restricts=True) for contract in contracts]
    buffers = RestrictionBuffers(ON)
    assert buffers.send([row_of(draw, slot) for slot, draw in enumerate(draws) if draw is not None]).all()
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
            expected = Sampler(contract, VOCABULARY, [1], 1, compiled=False).choose(row)
            assert int(found[0]) == expected.token
            assert float(first - second) == pytest.approx(expected.gap, abs=1e-9)
    assert left < total / 10  # ties at a bound


def test_candidates_equal_those_of_the_sampler() -> None:
    random = np.random.default_rng(3)
    contracts = [contract_of(terms) for terms in CONTRACTS]
    logits = (random.standard_normal((len(contracts), VOCABULARY)) * 3).astype(np.float32)
    for contract, row, found in zip(contracts, logits, chosen(contracts, logits, 32), strict=True):
        tokens, scores = Sampler(contract, VOCABULARY, [1], 1).leading(row, (), 32)
        known = torch.isfinite(found[32:])
        assert found[:32][known].long().tolist() == tokens.tolist()
        assert found[32:][known].tolist() == pytest.approx(scores.tolist(), abs=1e-9)


@pytest.mark.parametrize("wanted", [0, 5, MAX_LOGPROBS])
def test_log_probabilities_equal_the_samplers(wanted: int) -> None:
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


def test_rows_that_the_device_cannot_decide_are_left_to_the_host() -> None:
    wide = np.zeros((1, DEPTH + 50), np.float32)  # all alike: the filters keep more than is looked at, or cut a tie
    for terms in ({"top_p": 0.99}, {"min_p": 0.5}, {"top_k": 3}, {"top_k": DEPTH + 9}, {"top_p": 0.1}):
        assert torch.isnan(chosen([contract_of(terms)], wide)[0, 2]), terms
    halves = np.array([[0.0, 0.0, -np.inf, -np.inf]], np.float32)  # half of the probability is reached by the first
    assert torch.isnan(chosen([contract_of({"top_p": 0.5})], halves)[0, 2])
    single = np.array([[0.0, 5.0, -np.inf]], np.float32)
    found = chosen([contract_of({"top_p": 0.5})], single)[0]
    assert (int(found[0]), float(found[3])) == (1, -math.inf)


def test_rows_whose_lists_do_not_fit_are_left_to_the_host() -> None:
    long = Sampler(contract_of({"banned_ids": tuple(range(4000))}), 5000, [1], 1).draw(restricts=True)
    assert long is not None
    buffers = RestrictionBuffers(ON)
    fitting = ENTRIES // 4000
    row = row_of(long, 0)
    sent = [*[row] * fitting, None, row, None]
    assert buffers.send(sent).tolist() == [True] * fitting + [True, False, True]
    assert buffers.send([*[row] * (fitting + 2), None]).tolist() == [True] * fitting + [False, False, True]
    assert int(buffers.inputs(1).used) == fitting * 4000
    buffers.send([None])
    assert not int(buffers.inputs(1).used)


def test_stop_ids_are_banned_until_min_tokens_and_not_beyond() -> None:
    sampler = Sampler(contract_of({"min_tokens": 2, "stop_ids": (0,)}), 8, [1, 2], 2)
    draw = sampler.draw(restricts=True)
    assert draw is not None
    assert draw.restriction is not None
    buffers = RestrictionBuffers(ON)
    rows = [RestrictedRow(draw.restriction, 0, position, None) for position in (2, 4, 3, 5)]
    assert buffers.send(rows).all()
    inputs = buffers.inputs(4)
    assert inputs.entries[: int(inputs.used)].tolist() == [[0, 0, -math.inf], [2, 0, -math.inf]]
    assert sampler.draw(restricts=False) is None
    sampler.extend([3, 4])
    free = sampler.draw(restricts=False)
    assert free is not None
    assert free.restriction is None


def test_penalties_count_the_prompt_the_answer_and_the_path() -> None:
    """While texts grow, and slots change their sessions."""
    random = np.random.default_rng(3)
    buffers, restrictions = PenaltyBuffers(3, OUTPUTS, VOCABULARY, ON), RestrictionBuffers(ON)
    samplers: list[Sampler] = []
    for turn in range(30):
        if turn % 10 == 0:
            contracts = [contract_of(PENALTIES[(turn + slot) % len(PENALTIES)], seed=turn + slot) for slot in range(2)]
            samplers = [Sampler(contract, VOCABULARY, TEXT, 5, compiled=False) for contract in contracts]
        rows, paths = [], []
        for slot, sampler in enumerate(samplers):
            draw = sampler.draw(restricts=True, penalizes=True)
            assert draw is not None
            assert draw.restriction is not None
            for length in (0, 1, 5):
                paths.append((sampler, random.choice([3, 9, 11, VOCABULARY - 1], length)))
                rows.append(RestrictedRow(draw.restriction, 2 - slot, sampler._length + length, paths[-1][1]))
        sent = [*rows[:3], None, *rows[3:]]
        assert buffers.send(sent).all()
        assert restrictions.send(sent).all()
        logits = (random.standard_normal((len(sent), VOCABULARY)) * 3).astype(np.float32)
        keys = [0 if it is None else it.position for it in sent]
        bases = [0 if it is None else generation_base(paths[0][0].contract.seed, 0) for it in sent]
        bases[4:] = [generation_base(paths[3][0].contract.seed, 0)] * 3
        temperatures = [0.0 if it is None else paths[0][0].contract.temperature for it in sent]
        temperatures[4:] = [paths[3][0].contract.temperature] * 3
        found = choose_restricted(
            torch.from_numpy(logits).to(ON),
            torch.from_numpy(noise_keys(np.array(bases, np.uint64), np.array(keys)).view(np.int64)).to(ON),
            torch.tensor(temperatures, dtype=torch.float64, device=ON),
            restrictions.inputs(len(sent)),
            noise_steps(VOCABULARY, ON),
            2,
            buffers.inputs(len(sent)),
        ).cpu()
        assert int(found[3, 0]) == int(logits[3].argmax())
        for (sampler, path), row, (token, _, first, second) in zip(
            paths, np.delete(logits, 3, 0), found[[0, 1, 2, 4, 5, 6]].tolist(), strict=True
        ):
            expected = sampler.choose(row, path.tolist())
            assert int(token) == expected.token
            assert first - second == pytest.approx(expected.gap, abs=1e-9)
        for sampler in samplers:
            sampler.extend(random.choice([3, 9, VOCABULARY + 7, 20], int(random.integers(0, 4))).tolist())


def test_paths_that_are_not_known_or_too_long_together_are_left_to_the_host() -> None:
    draw = Sampler(contract_of(PENALTIES[0]), VOCABULARY, TEXT, 5).draw(restricts=True, penalizes=True)
    assert draw is not None
    assert draw.restriction is not None
    buffers = PenaltyBuffers(1, OUTPUTS, VOCABULARY, ON)
    paths = [None, np.zeros(PATH_TOKENS - 1, np.int64), np.zeros(2, np.int64), np.zeros(1, np.int64)]
    rows = [RestrictedRow(draw.restriction, 0, 9, path) for path in paths]
    assert buffers.send(rows).tolist() == [False, True, False, True]


def test_a_row_whose_path_is_outside_its_segment_has_no_path() -> None:
    """Such as a drafter's, whose earlier levels are in the cache alone."""
    draw = Sampler(contract_of(PENALTIES[0]), VOCABULARY, TEXT, 5).draw(restricts=True, penalizes=True)
    assert draw is not None
    assert draw.restriction is not None
    mask = np.array([[1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 0, 1]], np.bool_)
    segment = Segment(0, 6, np.array([41, 42, 43]), np.array([9, 10, 8]), mask, 3)
    found = [row.path for row in RestrictedRow.of_segment(segment, draw.restriction)]
    assert [None if path is None else path.tolist() for path in found] == [None, None, [43]]
    chain = Segment(0, 6, np.array([40, 41, 42, 43]), np.arange(6, 10), None, 3)
    found = [row.path for row in RestrictedRow.of_segment(chain, draw.restriction)]
    assert [None if path is None else path.tolist() for path in found] == [[], [42], [42, 43]]


@pytest.mark.parametrize("terms", PENALTIES)
def test_an_engine_without_penalties_leaves_them_to_the_sampler(terms: dict[str, Any]) -> None:
    sampler = Sampler(contract_of(terms), 8, [1, 2], 2)
    assert sampler.draw(restricts=True) is None
    assert sampler.draw(restricts=False, penalizes=True) is None


def test_an_engine_without_restrictions_gets_no_such_draw() -> None:
    for terms in CONTRACTS:
        sampler = Sampler(contract_of(terms), VOCABULARY, [1], 0)
        draw = sampler.draw(restricts=False)
        assert (draw is None) is bool(terms)
        assert sampler.draw(restricts=True) is not None
