"""The index of leases, in which generations that were left behind are found by the end of their leases.

    outrider:{leases}          sorted set: session id -> when its generation counts as left behind, unless its lease is
                               renewed; milliseconds since 1970 by Redis' clock
    outrider:{leases}:scanned  expires after SCAN_S; while it exists, no router scans all sessions

The record decides; the index only names the records to check. It holds every generation that has not ended (and may
hold others), and none is due there later than a lease after it is left behind:

- An entry is written when a generation begins or is restored, beside the script that does so, because a session's keys
  may lie on another node of a cluster. Appends and renewals do not touch it.
- The owner that ends a generation remembers its entry, and its router removes the entries of the last seconds together.
- An entry that is due is compared with its record: it moves to the record's present end, or is removed if the
  generation has ended. So a generation costs little more than the command that lists it, and an idle session nothing.
- An entry may be missing: a process died between the two writes, an older router wrote none, or the index's node lost
  its last writes. A scan of all sessions restores it, once in SCAN_S for all routers together. If the whole index is
  lost, so is the mark beside it, and the next sweep scans at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from outrider.store.redis.client import Client, decoding, redis_errors

MAX_DUE = 4096  # entries checked in one sweep; the others wait for the next one
MAX_ENDED = 16384  # ended entries that are remembered; beyond that the oldest are removed when they are due
_BATCH = 512  # ended entries in one call, so that the call is short
SCAN_S = 3600.0
SCANNING_S = 300.0  # after which another router scans, if the one that began has not finished

_INDEX = "outrider:{leases}"
_SCANNED = f"{_INDEX}:scanned"


@dataclass(frozen=True, slots=True)
class Lease:
    """An entry of the index."""

    session_id: str
    end_ms: int  # the end in the index


class Leases:
    """The index. Methods raise Unavailable when Redis cannot be used; all of them may be repeated."""

    def __init__(self, redis: Client) -> None:
        self._redis = redis
        self._ended: deque[Lease] = deque(maxlen=MAX_ENDED)
        self._add, self._due, self._move = (redis.register_script(_source(name)) for name in ("add", "due", "move"))

    async def add(self, session_id: str, lasts_ms: int) -> Lease:
        """Add a generation that is left behind in `lasts_ms` from now, unless its lease is renewed."""
        with redis_errors(self._redis):
            return Lease(session_id, int(await self._add(keys=[_INDEX], args=[session_id, lasts_ms])))

    async def add_missing(self, session_id: str, end_ms: int) -> None:
        """Add a generation that ends at `end_ms`, unless it has an entry."""
        with redis_errors(self._redis):
            await self._redis.zadd(_INDEX, {session_id: end_ms}, nx=True)

    async def due(self) -> list[Lease]:
        """Return the entries whose end has passed, the oldest first, at most MAX_DUE. Raises InternalError for a
        malformed index."""
        with redis_errors(self._redis):
            flat: Any = await self._due(keys=[_INDEX], args=[MAX_DUE])
        with decoding("the index of leases"):
            return [Lease(name.decode(), int(end)) for name, end in zip(flat[::2], flat[1::2], strict=True)]

    async def move(self, lease: Lease, end_ms: int) -> None:
        """Move an entry to another end, or remove it (0). Do nothing if the entry was rewritten meanwhile."""
        if end_ms != lease.end_ms:
            with redis_errors(self._redis):
                await self._move(keys=[_INDEX], args=[lease.session_id, lease.end_ms, end_ms])

    def queue_removal(self, lease: Lease) -> None:
        """Remember the entry of a generation that has ended: `remove_ended` removes it."""
        self._ended.append(lease)

    async def remove_ended(self) -> None:
        """Remove the entries of generations that have ended, unless they were rewritten meanwhile.

        Entries that cannot be removed now, because Redis is away, stay until they are due.
        """
        while self._ended:
            batch = [self._ended.popleft() for _ in range(min(_BATCH, len(self._ended)))]
            with redis_errors(self._redis):
                await self._move(
                    keys=[_INDEX], args=[part for lease in batch for part in (lease.session_id, lease.end_ms, 0)]
                )

    async def begin_scan(self) -> bool:
        """Return whether the caller is to scan all sessions. Mark the scan as begun."""
        with redis_errors(self._redis):
            return bool(await self._redis.set(_SCANNED, "", nx=True, px=round(SCANNING_S * 1000)))

    async def end_scan(self) -> None:
        """Mark the scan of all sessions as finished."""
        with redis_errors(self._redis):
            await self._redis.set(_SCANNED, "", px=round(SCAN_S * 1000))


def _source(script: str) -> str:
    return (files("outrider.store") / f"scripts/leases_{script}.lua").read_text(encoding="utf-8")
