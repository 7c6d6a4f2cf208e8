"""Group commit: writes of several sessions at the same moment go to Redis in one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.store.client import Client


class Script(Protocol):
    """A script that Redis holds. Calling it loads the script first if needed; a call may be repeated."""

    sha: str

    async def __call__(self, *, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run the script and return its reply; raises redis-py's errors."""


@dataclass(frozen=True, slots=True)
class _Call:
    script: Script
    keys: Sequence[str]
    args: Sequence[Any]
    reply: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class GroupCommit:
    """Runs scripts. Calls that come while others are under way are sent together once those are done; a single call is
    sent at once.

    A caller that is cancelled before its call is sent writes nothing. A caller that needs an order waits for each
    reply.
    """

    def __init__(self, redis: Client) -> None:
        self._redis = redis
        self._waiting: list[_Call] = []
        self._sending: asyncio.Task[None] | None = None

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script and return its reply. An error of Redis for one call is raised to its caller alone, a lost
        connection to all."""
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
            pipeline = self._redis.pipeline(transaction=False)  # a cluster's pipeline sends each node its own commands
            for call in calls:
                # `evalsha` of a pipeline refuses on a cluster, where a script's keys may lie apart; a session's keys do
                # not.
                pipeline.execute_command("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
        except Exception as error:
            for call in calls:
                _fail(call, error)
            return
        again: list[_Call] = []  # one by one: Redis forgot the script or a node went away; or it refuses again
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
