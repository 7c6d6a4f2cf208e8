"""Group commit: writes of several sessions at the same moment go to Redis in one round trip.

A server runs one script for many writes; the nodes of a cluster, where sessions lie apart, are sent them in a pipeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from redis.asyncio import RedisCluster
from redis.exceptions import ResponseError

from outrider.store.redis.client import Client

MAX_TOGETHER = 64  # calls of one script for many, which takes some 20 us of the server for each and lets in no other


class Script(Protocol):
    """A script that Redis holds. Calling it loads the script first if needed; a call may be repeated."""

    sha: str

    async def __call__(self, *, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run the script and return its reply; raises redis-py's errors."""


def script_for_many(source: str) -> str:
    """Return the source of a script that does what `source` does for several pairs of keys. Its arguments are those of
    each pair, their number in front of them; it replies with a list of replies.

    An error for one pair ends it: earlier pairs are written then, later ones not.
    """
    return f"""local function one(KEYS, ARGV)
{source}
end
local replies, at = {{}}, 1
for pair = 1, #KEYS / 2 do
  local count = tonumber(ARGV[at])
  replies[pair] = one({{ KEYS[2 * pair - 1], KEYS[2 * pair] }}, {{ unpack(ARGV, at + 1, at + count) }})
  at = at + 1 + count
end
return replies
"""


@dataclass(slots=True)
class _Call:
    script: Script
    keys: Sequence[str]
    args: Sequence[Any]
    reply: asyncio.Future[Any]


class GroupCommit:
    """Runs scripts. Calls that come while others are under way are sent together once those are done; a single call is
    sent at once.

    A caller that is cancelled before its call is sent writes nothing. A caller that needs an order waits for each
    reply.
    """

    def __init__(self, redis: Client, script: Script | None = None, for_many: Script | None = None) -> None:
        """`for_many` is `script` by `script_for_many`, which several calls of it are sent as; to run a call of it once
        more has to be harmless."""
        self._redis = redis
        self._script = script
        self._for_many = None if isinstance(redis, RedisCluster) else for_many
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[_Call] = []
        self._sending: asyncio.Task[None] | None = None

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script and return its reply. An error of Redis for one call is raised to its caller alone, a lost
        connection to all."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # kept, because the call is a system call before Python 3.12
        call = _Call(script, keys, args, self._loop.create_future())
        self._waiting.append(call)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        return await call.reply

    async def _send(self) -> None:
        try:
            while self._waiting:
                calls = [call for call in self._waiting if not call.reply.done()]
                self._waiting = []
                if len(calls) == 1:
                    await _send_one(calls[0])
                elif self._for_many is None or any(call.script is not self._script for call in calls):
                    await self._send_many(calls)
                else:
                    for first in range(0, len(calls), MAX_TOGETHER):
                        await self._send_as_one(self._for_many, calls[first : first + MAX_TOGETHER])
        finally:
            self._sending = None

    async def _send_as_one(self, script: Script, calls: Sequence[_Call]) -> None:
        keys = [key for call in calls for key in call.keys]
        args = chain.from_iterable((len(call.args), *call.args) for call in calls)
        try:
            replies = await script(keys=keys, args=list(args))
        except ResponseError:  # of one of them, which then gets its own
            await asyncio.gather(*map(_send_one, calls))
        except Exception as error:
            for call in calls:
                _fail(call, error)
        else:
            for call, reply in zip(calls, replies, strict=True):
                _succeed(call, reply)

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
            else:
                _succeed(call, reply)
        await asyncio.gather(*map(_send_one, again))


async def _send_one(call: _Call) -> None:
    try:
        reply = await call.script(keys=call.keys, args=call.args)
    except Exception as error:
        _fail(call, error)
    else:
        _succeed(call, reply)


def _succeed(call: _Call, reply: Any) -> None:
    if not call.reply.done():
        call.reply.set_result(reply)


def _fail(call: _Call, error: Exception) -> None:
    if not call.reply.done():
        call.reply.set_exception(error)
