"""What is read again from the log is made into messages in turns, and who does not read holds no turn."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from outrider.core.session.contract import Contract
from outrider.limits.fair_turns import LoopTurns
from router.api.running_calls import _send
from router.sessions.response import ResponsePart

REPLAYED = ResponsePart(1, (1, 2), (), b"", "ab", 2)
COMMITTED = ResponsePart(1, (1, 2), (0.5, 0.5), b"", "ab", 2)


class Client:
    """A client that takes a message when it is allowed to."""

    def __init__(self, *, reads: bool) -> None:
        self.received: list[Any] = []
        self._may_read = asyncio.Event()
        if reads:
            self._may_read.set()

    async def write(self, message: Any) -> None:
        await self._may_read.wait()
        self.received.append(message)


class Turns(LoopTurns):
    """Counts turns."""

    count = 0

    async def run(self, *args: Any, **options: Any) -> Any:
        self.count += 1
        return await super().run(*args, **options)


def sending(turns: LoopTurns, client: Client, part: ResponsePart) -> asyncio.Task[None]:
    opened: Any = SimpleNamespace(
        turn=SimpleNamespace(contract=Contract(seed=1, max_tokens=9)),
        model=SimpleNamespace(token_text=lambda token: b"x"),
        record=SimpleNamespace(tenant="one"),
    )
    context: Any = client
    return asyncio.create_task(_send(turns, context, opened, part))


async def test_a_client_that_does_not_read_holds_no_turn() -> None:
    turns, deaf, reading = LoopTurns(), Client(reads=False), Client(reads=True)
    stuck = sending(turns, deaf, REPLAYED)
    await asyncio.wait_for(sending(turns, reading, REPLAYED), 5)
    assert [len(client.received) for client in (deaf, reading)] == [0, 1]
    stuck.cancel()


async def test_only_replays_from_the_log_wait_for_a_turn() -> None:
    turns, client = Turns(), Client(reads=True)
    await sending(turns, client, COMMITTED)
    assert turns.count == 0
    await sending(turns, client, REPLAYED)
    assert (turns.count, len(client.received)) == (1, 2)
