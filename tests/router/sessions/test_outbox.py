"""The outbox: a client that reads slowly is waited for, one that does not read is not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from outrider.errors import Cancelled, InternalError, Moved, Unavailable
from router.sessions import outbox as module
from router.sessions.outbox import Event, Outbox
from router.sessions.response import ResponsePart

WINDOW = 4


def part(position: int, tokens: int = 2) -> ResponsePart:
    return ResponsePart(position, tuple(range(tokens)), (), b"", "ab" * tokens, position + tokens)


async def unread(event: Event) -> None:
    await asyncio.sleep(60)


async def send(outbox: Outbox, write: Callable[[Event], Awaitable[None]], *positions: int) -> None:
    """Parts at these positions, and the end."""
    async with asyncio.timeout(5), outbox:
        outbox.begin(write, 0, 0)
        for position in positions:
            outbox.put(part(position))


async def test_a_client_that_reads_steadily_is_waited_for_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SLOW_CLIENT_S", 0.3)
    sent: list[Event] = []

    async def write(event: Event) -> None:
        await asyncio.sleep(0.06)
        sent.append(event)

    async with Outbox(WINDOW) as outbox:
        outbox.begin(write, 0, 0)
        outbox.replay((part(position) for position in range(0, 20, 2)), 20, 20)
        outbox.put(part(20))
        assert outbox.behind
        assert outbox.limit == WINDOW
    assert [event.position for event in sent if isinstance(event, ResponsePart)] == [*range(0, 22, 2)]
    assert not outbox.behind
    assert outbox.limit == 22


async def test_a_client_that_stops_reading_is_given_up_with_its_queued_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOW_CLIENT_S", 0.1)
    outbox = Outbox(WINDOW)
    with pytest.raises(Unavailable, match="did not read"):
        await send(outbox, unread, 0)
    assert outbox.stalled


async def test_a_draining_router_does_not_wait_for_slow_clients() -> None:
    outbox = Outbox(WINDOW)
    outbox.cut_short(Moved("this router is going down"))
    with pytest.raises(Moved):
        await send(outbox, unread, 0)


async def test_the_client_s_progress_and_its_end_are_reported_to_the_task_that_waits() -> None:
    broken, limits = list[Exception](), list[int]()

    async def write(event: Event) -> None:
        assert isinstance(event, ResponsePart)
        if event.position == 12:
            raise Cancelled("the client has gone")
        await asyncio.sleep(0.01)

    outbox = Outbox(WINDOW)
    outbox.on_progress = lambda: limits.append(outbox.limit)
    outbox.on_error = broken.append
    sending = asyncio.create_task(send(outbox, write, *range(0, 14, 2)))
    await asyncio.sleep(0)
    assert outbox.behind
    await outbox.caught_up()
    assert limits[0] == 2 + WINDOW
    with pytest.raises(Cancelled):
        await sending
    assert [type(error) for error in broken] == [Cancelled]


async def test_an_event_that_cannot_be_sent_raises_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def write(event: Event) -> None:
        raise KeyError("a bug")

    with pytest.raises(InternalError):
        await send(Outbox(WINDOW), write, 0)
    assert "a response cannot be sent" in caplog.text
