"""Deltas of levels that follow one another at once share a message; others are sent as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from drafter_svc.upstreams import upstream as upstreams
from drafter_svc.upstreams.upstream import LINGER_S, Attachment, Upstream
from outrider.core.tree.delta import Delta
from outrider.v1 import drafter_pb2 as pb

KEY = Attachment("s", "", 1, b"", 1)
QUICK, SLOW = LINGER_S / 10, 10 * LINGER_S


@asynccontextmanager
async def upstream(level_s: float, *, batches: bool = True) -> AsyncIterator[Upstream]:
    """A stream that is open, whose messages the test takes."""
    listener: Any = SimpleNamespace(level_s=level_s, progress=None)
    made = Upstream("127.0.0.1:1", pb.Hello(), listener, lambda: None)
    made._open, made._batches = True, batches
    try:
        yield made
    finally:
        await made.close()


def delta(token: int) -> Delta:
    return Delta(0, 0, token, (0,), (token,), (-0.5,))


async def taken(made: Upstream, *sends: Callable[[], None]) -> list[int]:
    """How many deltas the next message has, if they are queued one turn of the loop after the other."""
    waiting = asyncio.create_task(made._next())
    for send in sends:
        await asyncio.sleep(0)
        send()
    message = await waiting
    return [it.first_id for it in message.deltas or [message.delta]]


@pytest.mark.parametrize(
    ("level_s", "batches", "expected"),
    [(QUICK, True, [1, 2]), (SLOW, True, [1]), (0.0, True, [1]), (QUICK, False, [1])],
)
async def test_a_delta_waits_for_the_next_one_where_that_comes_at_once(
    level_s: float, batches: bool, expected: list[int]
) -> None:
    async with upstream(level_s, batches=batches) as made:
        sends = [lambda number=number: made.send(KEY, delta(number), 1, number == 2) for number in (1, 2)]
        assert await taken(made, *sends) == expected


async def test_it_waits_for_a_moment_alone() -> None:
    async with upstream(QUICK) as made:
        began = time.monotonic()
        assert await taken(made, lambda: made.send(KEY, delta(1), 1, False)) == [1]
        assert LINGER_S / 2 < time.monotonic() - began < 1.0


async def test_what_is_no_delta_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "LINGER_S", 60.0)
    async with upstream(QUICK) as made, asyncio.timeout(30.0):
        sends = (lambda: made.send(KEY, delta(1), 1, False), lambda: made.detach(KEY))
        made.attachments[KEY.session_id] = KEY
        assert await taken(made, *sends) == [1]
        assert (await made._next()).WhichOneof("frame") == "unsubscribe"
