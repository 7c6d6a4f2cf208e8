"""The device's noise and choice are the core's, number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.core.sampling.noise import generation_base, gumbel_row, noise_bits, noise_key, noise_keys
from outrider.core.sampling.sampler import Sampler
from outrider.core.session.contract import Contract
from outrider.engine.gpu.sampling import sampling
from tests.core.sampling.test_noise import VECTORS
from tests.engine.gpu.taped import DEVICE

ON = torch.device(DEVICE)


def keys_of(*keys: int) -> torch.Tensor:
    return torch.from_numpy(np.array(keys, np.uint64).view(np.int64)).to(ON)


@pytest.mark.parametrize(("seed", "choice", "position", "token", "bits"), VECTORS)
def test_bits_match_the_published_vectors(seed: int, choice: int, position: int, token: int, bits: int) -> None:
    steps = sampling.noise_steps(token + 1, ON)
    assert int(sampling.noise_bits(keys_of(noise_key(seed, choice, position)), steps)[0, token]) == bits


def test_noise_bits_equal_the_cores_for_any_key() -> None:
    random = np.random.default_rng(1)
    keys = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, *random.integers(0, 2**64, 40, np.uint64).tolist()]
    found = sampling.noise_bits(keys_of(*keys), sampling.noise_steps(3000, ON))
    for row, key in zip(found, keys, strict=True):
        assert np.array_equal(row.cpu().numpy().view(np.uint64), noise_bits(key, 0, 3000))


def test_noise_equals_the_cores_within_an_ulp() -> None:
    for position in range(20):
        bits = sampling.noise_bits(keys_of(noise_key(5, 1, position)), sampling.noise_steps(4096, ON))
        ours, expected = sampling.gumbel(bits)[0].cpu().numpy(), gumbel_row(5, 1, position, 4096)
        # The outer logarithm's argument may be an ulp off, which near 1 is more than an ulp of the result.
        assert (np.abs(ours - expected) <= 2 * np.spacing(np.maximum(np.abs(expected), 1.0))).all()
    ends = sampling.gumbel(torch.tensor([0, 1, 2**32 - 1], device=ON))
    assert torch.isfinite(ends).all()


def test_keys_of_positions_equal_the_cores() -> None:
    of = [(0, 0, 0), (2**64 - 1, 2**32 - 1, 1_000_000), (77, 3, 2**40), (77, 3, 5)]  # seed, choice, position
    bases = np.array([generation_base(seed, choice) for seed, choice, _ in of], np.uint64)
    assert noise_keys(bases, np.array([position for *_, position in of])).tolist() == [noise_key(*each) for each in of]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
def test_choices_equal_the_samplers_over_thousands_of_rows(temperature: float) -> None:
    random = np.random.default_rng(int(temperature * 10))
    vocabulary, rows = 311, 1500
    logits = (random.standard_normal((rows, vocabulary)) * 3).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # ties
    logits[::7, 200:] = -np.inf  # ids that may not be chosen
    logits[::11] = 1.0  # all alike
    contract = Contract(seed=4, choice=1, max_tokens=9, temperature=temperature)
    draw = Sampler(contract, vocabulary, [1], 0).draw(restricts=False)
    assert draw is not None
    keys = torch.from_numpy(noise_keys(np.array(draw.base, np.uint64), np.arange(1, rows + 1)).view(np.int64)).to(ON)
    scores = sampling.scores(
        torch.from_numpy(logits).to(ON),
        keys,
        torch.full((rows,), temperature, dtype=torch.float64, device=ON),
        sampling.noise_steps(vocabulary, ON),
    )
    tokens, values = sampling.best(scores, 2)
    sampler = Sampler(contract, vocabulary, [1], 0)
    for row in range(rows):
        expected = sampler.choose(logits[row])
        assert int(tokens[row, 0]) == expected.token, row
        assert float(values[row, 0] - values[row, 1]) == pytest.approx(expected.gap, abs=1e-9)
        sampler.extend([1])


def test_the_lowest_id_wins_every_tie() -> None:
    tokens, values = sampling.best(
        torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]], device=ON).double(), 4
    )
    assert tokens.tolist() == [[1, 2, 4, 3], [0, 1, 2, 3]]
    assert values.tolist() == [[3.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]


def test_a_vocabulary_of_one_has_no_runner_up() -> None:
    _, values = sampling.best(torch.zeros(1, 1, device=ON).double(), 2)
    assert float(values[0, 0] - values[0, 1]) == np.inf
