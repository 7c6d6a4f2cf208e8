"""The noise and the digest are the same numbers everywhere, and the noise is noise."""

import hashlib
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from outrider.core.sampling.noise import (
    NoiseRows,
    _gumbel,
    generation_base,
    gumbel_at,
    gumbel_row,
    noise_bits,
    noise_key,
    noise_keys,
)
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.core.session.digest import EMPTY, MASK, PHI, extend, mix64, tokenizer_digest


def plain_bits(seed: int, choice: int, position: int, token: int) -> int:
    """The definition, one Python integer at a time."""
    key = mix64((mix64((seed + choice * PHI) & MASK) + position * PHI) & MASK)
    return mix64((key + PHI * (token + 1)) & MASK) >> 32


def test_mix64_is_splitmix64() -> None:
    # The first outputs of splitmix64 seeded with 0, as Vigna published them.
    assert mix64(PHI) == 0xE220A8397B1DCDAF
    assert mix64(2 * PHI) == 0x6E789E6AA1B965F4
    assert mix64(3 * PHI) == 0x06C45D188009454F


VECTORS = [
    # seed, choice, position, token, 32 bits
    (0, 0, 0, 0, 0xE220A839),
    (7, 0, 1, 42, 0xF6B94E30),
    (7, 1, 1, 42, 0xA5F59234),
    (2**64 - 1, 2**32 - 1, 1_000_000, 127_999, 0xF5EBD8B7),
]


@pytest.mark.parametrize(("seed", "choice", "position", "token", "bits"), VECTORS)
def test_bits_match_the_published_vectors(seed: int, choice: int, position: int, token: int, bits: int) -> None:
    row = noise_bits(noise_key(seed, choice, position), token, 1)
    assert int(row[0]) == bits == plain_bits(seed, choice, position, token)


def test_noise_matches_high_precision_arithmetic() -> None:
    row = gumbel_row(3, 0, 17, 4096)
    for token in range(0, 4096, 97):
        u = min((plain_bits(3, 0, 17, token) + 0.5) * 2.0**-32, 1 - 2.0**-24)
        assert row[token] == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-14, abs=1e-14)


def test_noise_is_finite_at_both_ends() -> None:
    least, one, most = _gumbel(np.array([2**32 - 1, 1, 0], np.uint64))
    assert least == pytest.approx(-math.log(24 * math.log(2)), rel=1e-12)  # u is cut at 1 - 2^-24
    assert one == pytest.approx(-math.log(1.5 * 2.0**-32), rel=1e-9)
    assert most == pytest.approx(33 * math.log(2), rel=1e-9)  # -log of u = 2^-33


def test_greedy_sampling_has_no_noise_and_noise_rows_are_computed_once() -> None:
    assert NoiseRows(1, 0, 8, greedy=True).row(3) is None
    rows = NoiseRows(1, 0, 8, greedy=False)
    first = rows.row(3)
    assert rows.row(3) is first
    rows.forget_below(4)
    assert rows.row(3) is not first


def test_choices_follow_the_distribution() -> None:
    """Chi-square of the step from noise to choice; fixed seeds, so it either holds or it does not."""
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.07, 0.03], dtype=np.float32))
    sampler = Sampler(Contract(seed=11, max_tokens=1), 5, [0], 1)
    counts = np.zeros(5)
    for _ in range(20_000):
        token = sampler.choose(logits).token
        sampler.extend([token])
        counts[token] += 1
    assert stats.chisquare(counts, np.exp(logits.astype(np.float64)) / np.exp(logits).sum() * 20_000).pvalue > 0.01


@pytest.mark.parametrize("axis", ["position", "choice", "seed"])
def test_choices_along_each_axis_are_independent(axis: str) -> None:
    logits = np.zeros(4, dtype=np.float32)
    chosen = []
    for i in range(8_000):
        place = {"seed": 5, "choice": 0, "position": 9} | {axis: i}
        contract = Contract(seed=place["seed"], choice=place["choice"], max_tokens=1)
        chosen.append(Sampler(contract, 4, [0] * place["position"], 0).choose(logits).token)
    pairs = np.zeros((4, 4))
    for a, b in itertools.pairwise(chosen):
        pairs[a, b] += 1
    assert stats.chi2_contingency(pairs).pvalue > 0.01


def test_agreement_with_one_candidate_is_the_exact_formula() -> None:
    """P(argmax(log p + g) == argmax(log q + g)) = sum_i 1 / sum_j max(p_j/p_i, q_j/q_i)."""
    generator = np.random.default_rng(4)
    p, q = generator.dirichlet(np.ones(6), size=2)
    exact = sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(6)) for i in range(6))
    noise = np.stack([gumbel_row(1, 0, position, 6) for position in range(40_000)])
    agreed = ((np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1)).mean()
    assert abs(agreed - exact) < 4 * math.sqrt(exact * (1 - exact) / 40_000)


def test_the_digest_matches_published_vectors_and_extends_piecewise() -> None:
    assert mix64(int.from_bytes(b"outrider", "big")) == EMPTY
    assert extend(EMPTY, [1, 2, 3]) == 0x89E946AE92DEC53C
    assert extend(extend(EMPTY, [1]), [2, 3]) == extend(EMPTY, [1, 2, 3])
    assert extend(EMPTY, [1, 3, 2]) != extend(EMPTY, [1, 2, 3])
    assert extend(EMPTY, [0]) != EMPTY


def test_the_noise_of_some_tokens_equals_their_part_of_the_row() -> None:
    tokens = np.array([4095, 0, 17, 17])
    np.testing.assert_array_equal(gumbel_at(3, 1, 17, tokens), gumbel_row(3, 1, 17, 4096)[tokens])


def test_keys_of_many_positions_equal_the_key_of_each() -> None:
    seeds, positions = (7, 2**64 - 1, 7), np.array([3, 1_000_000, 0])
    bases = np.array([generation_base(seed, 2) for seed in seeds], np.uint64)
    keys = noise_keys(bases, positions)
    assert keys.tolist() == [noise_key(seed, 2, int(at)) for seed, at in zip(seeds, positions, strict=True)]
    assert positions.tolist() == [3, 1_000_000, 0]


def test_bits_of_a_range_of_tokens_equal_the_bits_of_each() -> None:
    key = noise_key(7, 1, 1)
    assert noise_bits(key, 40, 5).tolist() == [plain_bits(7, 1, 1, token) for token in range(40, 45)]


def test_rows_are_kept_from_the_first_position_that_is_not_committed_on() -> None:
    rows = NoiseRows.of(Contract(seed=5, choice=2, max_tokens=1), 8)
    first, second = rows.row(3), rows.row(4)
    np.testing.assert_array_equal(first, gumbel_row(5, 2, 3, 8))
    rows.forget_below(4)
    assert rows.row(4) is second
    assert rows.row(3) is not first
    assert NoiseRows.of(Contract(seed=5, max_tokens=1, temperature=0.0), 8).row(3) is None


def test_a_tokenizer_s_digest_depends_on_the_content_of_its_file_and_not_on_its_formatting() -> None:
    expected = hashlib.sha256('{"a":[1,"é"],"b":2}'.encode()).digest()[:16]
    assert tokenizer_digest(b'{"b": 2,\n "a": [1, "\\u00e9"]}') == expected
    assert tokenizer_digest('{"a":[1,"é"],"b":2}'.encode()) == expected
