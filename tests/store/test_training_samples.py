"""The replay buffer keeps the newest examples of a target, and no more of them than it may."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from redis.asyncio import Redis

from outrider.core.session.training_samples import TrainingSample, sample_of
from outrider.store.training_samples import KEPT_S, TrainingSampleStore

KEY = "outrider:{examples}:target:00"


def example(number: int) -> TrainingSample:
    return sample_of([1, number], np.array([[number, 7]]), np.array([[-0.1, -3.0]], np.float32))


async def numbers(examples: TrainingSampleStore, place: str = "0") -> list[int]:
    found, _ = await examples.after(place, 10_000)
    return [int(each.tokens[-1]) for each in found]


async def test_samples_are_read_in_order_and_each_reader_continues_at_its_position(client: Redis) -> None:
    examples = TrainingSampleStore(client, "target", b"\0")
    assert await examples.end() == "0"
    await examples.add([example(1), example(2)])
    found, place = await examples.after("0", 1)
    assert [int(each.ids[0, 0]) for each in found] == [1]
    await examples.add([example(3)])
    assert await numbers(examples, place) == [2, 3]
    assert await examples.after(await examples.end()) == ([], await examples.end())


async def test_the_oldest_samples_are_dropped_and_all_expire_in_a_day(client: Redis) -> None:
    examples = TrainingSampleStore(client, "target", b"\0", max_samples=100)
    for start in range(0, 1000, 100):
        await examples.add([example(number) for number in range(start, start + 100)])
    kept = await numbers(examples)
    assert 100 <= len(kept) < 250  # whole nodes of the stream go at a time
    assert kept[-1] == 999
    assert 0 < await client.ttl(KEY) <= KEPT_S


async def test_samples_older_than_a_day_are_dropped_while_others_arrive(client: Redis) -> None:
    await client.xadd(KEY, {b"e": example(1).pack()}, id="1-1")
    examples = TrainingSampleStore(client, "target", b"\0")
    await examples.add([example(2)])
    assert await numbers(examples) == [2]


async def test_targets_and_tokenizers_are_apart(client: Redis) -> None:
    await TrainingSampleStore(client, "target", b"\0").add([example(1)])
    assert await numbers(TrainingSampleStore(client, "target", b"\1")) == []
    assert await numbers(TrainingSampleStore(client, "other", b"\0")) == []


async def test_a_malformed_sample_is_skipped_and_logged(client: Redis, caplog: pytest.LogCaptureFixture) -> None:
    examples = TrainingSampleStore(client, "target", b"\0")
    await client.xadd(KEY, {b"e": b"nonsense"})
    await client.xadd(KEY, {b"x": b""})
    await examples.add([example(1)])
    with caplog.at_level(logging.WARNING):
        assert await numbers(examples) == [1]
    assert caplog.text.count("skipped an entry") == 2
