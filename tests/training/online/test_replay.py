"""The examples at hand are bounded, new ones count more, and what judges was never learned from."""

import numpy as np

from outrider.core.session.training_samples import TrainingSample, sample_of
from outrider.training.online.replay import EVERY, HELD_BACK, NEWEST, PASSES, SAMPLED, ReplayBuffer


def example(number: int) -> TrainingSample:
    return sample_of([1, number], np.array([[number, 7]]), np.array([[-0.1, -3.0]], np.float32))


def number(example: TrainingSample) -> int:
    return int(example.tokens[-1])


def test_new_samples_are_trained_on_more_and_old_samples_are_not_forgotten() -> None:
    replay = ReplayBuffer(np.random.default_rng(0))
    replay.add(example(each) for each in range(2000))
    drawn = [number(each) for _ in range(200) for each in replay.batch(4)]
    assert len({each for each in drawn if each >= 2000 - 2 * NEWEST}) >= NEWEST
    assert 0.75 * (NEWEST + SAMPLED) < len({*drawn}) <= NEWEST + SAMPLED
    new = sum(each >= 2000 - 2 * NEWEST for each in drawn) / len(drawn)
    assert 0.5 <= new < 0.6
    assert min(drawn) < 200


def test_held_back_samples_are_new_and_never_trained_on() -> None:
    replay = ReplayBuffer(np.random.default_rng(0))
    replay.add(example(each) for each in range(600))
    held = {number(each) for each in replay.held_back}
    assert len(held) == HELD_BACK
    assert min(held) >= 600 - HELD_BACK * EVERY
    assert held.isdisjoint(number(each) for _ in range(500) for each in replay.batch(4))


def test_each_sample_is_trained_on_a_few_times() -> None:
    replay = ReplayBuffer(np.random.default_rng(0))
    assert replay.batch(4) == []
    replay.add([example(1), example(2)], known=True)
    assert replay.batch(4) == []
    replay.add(example(each) for each in range(12))
    batches = 0
    while replay.batch(1):
        batches += 1
    assert 8 * PASSES <= batches <= 12 * PASSES
