"""Group commit: what several sessions write at the same moment goes to Redis in one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.store.client import Client


class Script(Protocol):
    """One that Redis holds; called by itself it sees to that. May be repeated."""

    sha: str

    async def __call__(self, *, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Its reply; raises what redis-py does."""


@dataclass(frozen=True, slots=True)
class _Call:
    script: Script
    keys: Sequence[str]
    args: Sequence[Any]
    reply: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Together:
    """Runs scripts. What comes while others are under way goes together, as soon as those are done; one that comes
    alone goes at once.

    A caller who was cancelled before his turn writes nothing. One who has to keep an order waits for each reply.
    """

    def __init__(self, redis: Client) -> None:
        self._redis = redis
        self._waiting: list[_Call] = []
        self._sending: asyncio.Task[None] | None = None

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """A script's reply. What Redis refuses to one caller is raised for him alone, a lost connection for all."""
        call = _Call(script, keys, args)
        self._waiting.append(call)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await call.reply

    async def _send(self) -> None:
        try:
            while self._waiting:
                calls = [call for call in self._waiting if not call.reply.done()]
                self._waiting = []
                if len(calls) > 1:
                    await self._send_many(calls)
                elif calls:
                    await _send_one(calls[0])
        finally:
            self._sending = None

    async def _send_many(self, calls: Sequence[_Call]) -> None:
        try:
            pipeline = self._redis.pipeline(transaction=False)  # a cluster's sends to each node what is its own
            for call in calls:
                # Its `evalsha` refuses on a cluster, where one script's keys may lie apart; those of a session do not.
                pipeline.execute_command("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
        except Exception as error:
            for call in calls:
                _fail(call, error)
            return
        again: list[_Call] = []  # alone: Redis forgot the script, or a node of a cluster went away; or it says so again
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, Exception):
                again.append(call)
            elif not call.reply.done():
                call.reply.set_result(reply)
        await asyncio.gather(*map(_send_one, again))


async def _send_one(call: _Call) -> None:
    try:
        reply = await call.script(keys=call.keys, args=call.args)
    except Exception as error:
        _fail(call, error)
    else:
        if not call.reply.done():
            call.reply.set_result(reply)


def _fail(call: _Call, error: Exception) -> None:
    if not call.reply.done():
        call.reply.set_exception(error)
