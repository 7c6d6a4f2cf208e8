"""Deltas of levels that follow one another at once share a message; others are sent as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from drafter_svc.upstreams import outgoing
from drafter_svc.upstreams.outgoing import LINGER_S
from drafter_svc.upstreams.upstream import Attachment, Upstream
from outrider.core.tree.delta import Delta
from outrider.v1 import drafter_pb2 as pb
from tests.drafter.fake_stream import FakeStream

QUICK, SLOW = LINGER_S / 10, 10 * LINGER_S


class Opened(NamedTuple):
    """A drafter's stream that is open, with one session."""

    upstream: Upstream
    key: Attachment
    stream: FakeStream

    async def deltas(self, *sends: Callable[[], None]) -> list[int]:
        """The first ids of the deltas in the next message, if they are queued one turn of the loop after the other."""
        before = len(self.stream.sent)
        for send in sends:
            await asyncio.sleep(0)
            send()
        while len(self.stream.sent) == before:
            await asyncio.sleep(0)
        message = self.stream.sent[before]
        return [it.first_id for it in message.deltas or [message.delta]]


Opens = Callable[..., Awaitable[Opened]]


@pytest_asyncio.fixture
async def opens(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Opens]:
    made: list[Upstream] = []

    async def opens(level_s: float, *, batches: bool = True) -> Opened:
        listener: Any = SimpleNamespace(level_s=level_s, closed=lambda key: None)
        stream, key = FakeStream(monkeypatch), Attachment("s", "", 1, b"")
        made.append(Upstream("127.0.0.1:1", pb.Hello(), listener, lambda: None))
        made[0].attach(key)
        await stream.receive(pb.DraftDown(welcome=pb.Welcome(batches=batches)))
        return Opened(made[0], key, stream)

    yield opens
    await made[0].close()


def delta(token: int) -> Delta:
    return Delta(0, 0, token, (0,), (token,), (-0.5,))


@pytest.mark.parametrize(
    ("level_s", "batches", "expected"),
    [(QUICK, True, [1, 2]), (SLOW, True, [1]), (0.0, True, [1]), (QUICK, False, [1])],
)
async def test_a_delta_waits_for_a_second_one_that_follows_at_once(
    opens: Opens, level_s: float, batches: bool, expected: list[int]
) -> None:
    made = await opens(level_s, batches=batches)
    sends = [lambda number=number: made.upstream.send(made.key, delta(number), 1, number == 2) for number in (1, 2)]
    assert await made.deltas(*sends) == expected


async def test_a_delta_waits_for_no_longer_than_a_moment(opens: Opens) -> None:
    made = await opens(QUICK)
    began = time.monotonic()
    assert await made.deltas(lambda: made.upstream.send(made.key, delta(1), 1, False)) == [1]
    assert LINGER_S / 2 < time.monotonic() - began < 1.0


async def test_a_frame_that_is_no_delta_does_not_wait(opens: Opens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "LINGER_S", 60.0)
    made = await opens(QUICK)
    async with asyncio.timeout(30.0):
        sends = (lambda: made.upstream.send(made.key, delta(1), 1, False), lambda: made.upstream.detach(made.key))
        assert await made.deltas(*sends) == [1]
        await made.stream.settle()
    assert made.stream.sent[-1].WhichOneof("frame") == "unsubscribe"
