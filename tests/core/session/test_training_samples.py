"""An example survives its bytes, and what is none is refused."""

import numpy as np
import pytest

from outrider.core.session.training_samples import MAX_CONTEXT, TOP, TrainingSample, sample_of

GENERATOR = np.random.default_rng(0)
IDS = GENERATOR.integers(0, 4096, (5, 20))
LOGPROBS = -np.sort(GENERATOR.random((5, 20)).astype(np.float32) * 8, axis=1)


def test_a_sample_survives_serialization() -> None:
    example = sample_of(range(40), IDS, LOGPROBS, greedy=True)
    assert (example.first, example.chosen, example.ids.shape) == (35, 5, (5, TOP))
    again = TrainingSample.unpack(example.pack())
    assert (again.first, again.greedy) == (example.first, True)
    assert (again.tokens == example.tokens).all()
    assert (again.ids == example.ids).all()
    assert again.logprobs == pytest.approx(example.logprobs, abs=4e-3)


def test_alternatives_that_do_not_exist_stay_impossible() -> None:
    logprobs = np.full((1, 2), -np.inf, np.float32)
    assert np.isneginf(TrainingSample.unpack(sample_of([1, 2], IDS[:1, :2], logprobs).pack()).logprobs).all()


def test_only_the_end_of_a_long_session_becomes_a_sample() -> None:
    example = sample_of(range(10_000), IDS, LOGPROBS)
    assert (len(example.tokens), example.first) == (MAX_CONTEXT + 5, MAX_CONTEXT)
    assert example.tokens[-1] == 9_999


BLOB = sample_of(range(40), IDS, LOGPROBS).pack()


@pytest.mark.parametrize(
    "blob",
    [
        *(b"", BLOB[:5], BLOB[:-1], BLOB + b"x"),
        *(b"\x01" + BLOB[1:], BLOB[:6] + b"\x02" + BLOB[7:], BLOB[:-2] + b"\x00\x7e"),
    ],
)
def test_malformed_sample_bytes_are_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match=r"training sample|log-prob"):
        TrainingSample.unpack(blob)
