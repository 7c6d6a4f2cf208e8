"""Where generations that were left behind are looked for: an index of leases, by their end.

    outrider:{leases}          sorted set: session id -> when its generation counts as left behind, unless its lease is
                               renewed; milliseconds since 1970 by Redis' clock
    outrider:{leases}:scanned  expires after SCAN_S; while it is there, nobody scans all sessions

The record decides, and the index only says which records are worth a look. It holds every generation that has not ended
(and may hold others), and none is due there later than a lease after it is left behind:

- An entry is written when a generation begins or is restored, beside the script that does so, because a session's keys
  may lie on another node of a cluster. Appends and renewals do not touch it.
- Who ends a generation remembers its entry, and a router removes those of the last seconds together.
- An entry that is due is held against its record: it moves to the record's present end, or goes with a generation that
  has ended. So a generation costs little more than the command that lists it, and an idle session nothing.
- An entry may be missing: a process died between the two writes, an older router wrote none, the index's node lost its
  last moments. A scan of all sessions puts it back, once in SCAN_S for all routers together. Whoever loses the whole
  index loses the mark beside it, so that the next sweep scans at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from outrider.store.client import Client, ours, translated

MOST_DUE = 4096  # entries that are looked at in one sweep; the others wait for the next one
MOST_ENDED = 16384  # entries to be removed that are remembered; of more, the first go when they are due
_TOGETHER = 512  # of them in one call, so that it holds nobody up
SCAN_S = 3600.0  # between two scans of all sessions
SCANNING_S = 300.0  # after which another router scans, if whoever began has not come to the end

_INDEX = "outrider:{leases}"
_SCANNED = f"{_INDEX}:scanned"


@dataclass(frozen=True, slots=True)
class Lease:
    """An entry of the index."""

    session_id: str
    end_ms: int  # as the index has it


class Leases:
    """The index. Methods raise Unavailable when Redis cannot be used; all of them may be repeated."""

    def __init__(self, redis: Client) -> None:
        self._redis = redis
        self._ended: deque[Lease] = deque(maxlen=MOST_ENDED)
        self._add, self._due, self._move = (redis.register_script(_source(name)) for name in ("add", "due", "move"))

    async def add(self, session_id: str, lasts_ms: int) -> Lease:
        """Lists a generation that is left behind in `lasts_ms` from now, unless something happens."""
        with translated(self._redis):
            return Lease(session_id, int(await self._add(keys=[_INDEX], args=[session_id, lasts_ms])))

    async def add_missing(self, session_id: str, end_ms: int) -> None:
        """Lists a generation that ends then, if it is not listed."""
        with translated(self._redis):
            await self._redis.zadd(_INDEX, {session_id: end_ms}, nx=True)

    async def due(self) -> list[Lease]:
        """Entries whose end has come, the oldest first, MOST_DUE at most. Raises InternalError for what is none."""
        with translated(self._redis):
            flat: Any = await self._due(keys=[_INDEX], args=[MOST_DUE])
        with ours("the index of leases"):
            return [Lease(name.decode(), int(end)) for name, end in zip(flat[::2], flat[1::2], strict=True)]

    async def move(self, lease: Lease, end_ms: int) -> None:
        """Moves an entry to another end, or removes it (0). Nothing happens if somebody listed the session anew."""
        if end_ms != lease.end_ms:
            with translated(self._redis):
                await self._move(keys=[_INDEX], args=[lease.session_id, lease.end_ms, end_ms])

    def ended(self, lease: Lease) -> None:
        """The generation that was listed so has ended: `remove_ended` removes its entry."""
        self._ended.append(lease)

    async def remove_ended(self) -> None:
        """Removes the entries of generations that have ended, if nobody has changed them since.

        What cannot be removed now, because Redis is away, stays until it is due.
        """
        while self._ended:
            some = [self._ended.popleft() for _ in range(min(_TOGETHER, len(self._ended)))]
            with translated(self._redis):
                await self._move(keys=[_INDEX], args=[part for it in some for part in (it.session_id, it.end_ms, 0)])

    async def begin_scan(self) -> bool:
        """Whether all sessions are to be scanned, and by the caller."""
        with translated(self._redis):
            return bool(await self._redis.set(_SCANNED, "", nx=True, px=round(SCANNING_S * 1000)))

    async def end_scan(self) -> None:
        """All sessions were scanned."""
        with translated(self._redis):
            await self._redis.set(_SCANNED, "", px=round(SCAN_S * 1000))


def _source(script: str) -> str:
    return (files("outrider.store") / f"leases_{script}.lua").read_text(encoding="utf-8")
