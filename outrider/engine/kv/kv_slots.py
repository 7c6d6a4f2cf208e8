"""The KV slots of an engine: which are free, and which text each holds. KV of a finished turn stays for the next one.

A prompt that shares a prefix with a running session takes the KV of the prefix from that session's slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.session.prefix_keys import LENGTHS, MAX_KEYS, prefix_keys
from outrider.errors import Overloaded

WORTHWHILE = 8  # a shared prefix of fewer tokens is computed again instead of reused


class AcquiredSlot(NamedTuple):
    """A KV slot that a session has acquired."""

    slot: int
    cached: int  # rows [0, cached) hold the KV of its first tokens, once `source` is copied
    source: int | None  # slot to copy rows [0, cached) from before the next pass; None: no copy is needed


@dataclass(frozen=True)
class _KeptSlot:
    """The text whose KV a free slot still holds, or that the session of an acquired slot began with."""

    tokens: NDArray[np.int64]  # [rows] the tokens whose KV its first rows hold
    scope: str
    session: str  # the last session that had the slot

    @cached_property
    def keys(self) -> list[int]:
        """Keys of the text's prefixes; see outrider.core.session.prefix_keys."""
        return prefix_keys(self.tokens, self.scope)


_NOTHING = _KeptSlot(np.empty(0, np.int64), "", "")


class KvSlots:
    """The slots of an engine, least recently used first. Sessions share KV within one scope only.

    See `Contract.kv_scope`.
    """

    def __init__(self, count: int, *, rewinds: bool = True) -> None:
        """`rewinds`: whether a session can continue a slot before the end of the text that it holds."""
        self._count = count
        self._rewinds = rewinds
        self._free: OrderedDict[int, _KeptSlot] = OrderedDict((slot, _NOTHING) for slot in range(count))
        self._acquired: dict[int, _KeptSlot] = {}
        self._computed: dict[int, int] = {}  # by acquired slot: number of its tokens whose KV is there

    @property
    def free(self) -> int:
        """Number of slots that no session has."""
        return len(self._free)

    @property
    def warm(self) -> int:
        """Number of free slots that still hold the KV of a text."""
        return sum(bool(len(held.tokens)) for held in self._free.values())

    def keys(self) -> list[int]:
        """Return the keys of all prefixes whose KV sessions can share, those of the latest texts first.

        See outrider.core.session.prefix_keys. Empty where slots do not rewind: their KV serves only its own text.
        """
        acquired = [(held, self._computed[slot]) for slot, held in reversed(self._acquired.items())]
        free = [(held, len(held.tokens)) for held in reversed(self._free.values())]
        found: dict[int, None] = {}
        for held, rows in (*acquired, *free) if self._rewinds else ():
            found.update((key, None) for length, key in zip(LENGTHS, held.keys, strict=False) if length <= rows)
        return [*found][:MAX_KEYS]

    def acquire(self, tokens: Sequence[int], scope: str, session: str = "", most: int | None = None) -> AcquiredSlot:
        """Return a slot for a session over `tokens`, with as much of their KV as slots hold, at most of `most` tokens.

        The KV of the last token never counts. Where another slot is free, a slot that holds much more than the shared
        prefix is only copied from, and so is a slot that another session has. The session's own last slot is acquired
        in any case: what the session computed beyond its log serves no other text. Raises Overloaded when no slot is
        free.
        """
        if not self._free:
            raise Overloaded(f"all {self._count} slots are in use; retry later")
        wanted = np.asarray(tokens[:-1], np.int64)
        acquired = self._find(wanted[:most], scope, session)
        self._acquired[acquired.slot] = _KeptSlot(wanted, scope, session)
        self._computed[acquired.slot] = acquired.cached
        return acquired

    def mark_computed(self, slot: int, rows: int) -> None:
        """Record that an acquired slot has the KV of its first `rows` tokens by the next pass, until it is released."""
        self._computed[slot] = rows

    def _find(self, wanted: NDArray[np.int64], scope: str, session: str) -> AcquiredSlot:
        best, cached = None, WORTHWHILE - 1
        for slot, held in self._free.items():
            shared = _shared(held.tokens, wanted) if held.scope == scope else 0
            if shared > cached and (self._rewinds or shared == len(held.tokens)):
                best, cached = slot, shared
        oldest = next(iter(self._free))
        if self._rewinds:
            for slot, held in self._acquired.items():
                shared = min(_shared(held.tokens, wanted), self._computed[slot]) if held.scope == scope else 0
                if shared > cached:
                    best, cached = slot, shared
        if best is None:
            del self._free[oldest]
            return AcquiredSlot(oldest, 0, None)
        if best in self._free and self._should_reuse(best, cached, session):
            del self._free[best]
            return AcquiredSlot(best, cached, None)
        del self._free[oldest]
        if best in self._free:
            self._free.move_to_end(best)
        return AcquiredSlot(oldest, cached, best)

    def _should_reuse(self, slot: int, cached: int, session: str) -> bool:
        """Return whether to acquire a free slot that holds `cached` of a session's rows, instead of copying from it."""
        held = self._free[slot]
        same_session = bool(session) and held.session == session
        return same_session or slot == next(iter(self._free)) or len(held.tokens) - cached < WORTHWHILE

    def evict(self) -> int | None:
        """Clear the least recently used of the free slots that hold KV, and return it; None: no free slot holds any."""
        for slot, held in self._free.items():
            if len(held.tokens):
                self._free[slot] = _NOTHING
                self._free.move_to_end(slot, last=False)
                return slot
        return None

    def clear(self) -> None:
        """Forget the KV of all slots."""
        self._free = OrderedDict.fromkeys(self._free, _NOTHING)
        self._computed = dict.fromkeys(self._acquired, 0)

    def release(self, slot: int, tokens: Sequence[int], scope: str, session: str = "") -> None:
        """Free the slot of a session that ends; its first rows hold the KV of `tokens`."""
        self._acquired.pop(slot, None)
        self._computed.pop(slot, None)
        self._free[slot] = _KeptSlot(np.array(tokens, np.int64), scope, session)
        if not tokens:
            self._free.move_to_end(slot, last=False)


def _shared(held: NDArray[np.int64], wanted: NDArray[np.int64]) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(held), len(wanted))
    differ = np.flatnonzero(held[:length] != wanted[:length])
    return int(differ[0]) if len(differ) else length
