"""Which cache slots are free, and whose KV slots hold: a finished turn's stays until memory is needed.

A prompt that begins as that of a running session takes the common part from it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.core.prefixes import LENGTHS, MOST, prefix_keys
from outrider.errors import Overloaded

WORTHWHILE = 8  # tokens of a shared prefix below which nothing is gained by keeping to a slot


class Taken(NamedTuple):
    """A slot for a session."""

    slot: int
    cached: int  # rows [0, cached) hold the KV of its first tokens, once `source` is copied
    source: int | None  # slot whose rows [0, cached) are to be copied there before the next pass; None: none


@dataclass(frozen=True)
class _Held:
    """What a free slot still holds, or what a session that has one began with."""

    tokens: NDArray[np.int64]  # [rows] the tokens whose KV its first rows hold
    tenant: str
    session: str  # whose it was

    @cached_property
    def keys(self) -> list[int]:
        """Of the tokens' beginnings."""
        return prefix_keys(self.tokens, self.tenant)


_NOTHING = _Held(np.empty(0, np.int64), "", "")


class Slots:
    """Slots of an engine, least recently used first. What they hold is shared within one tenant only."""

    def __init__(self, count: int, *, rewinds: bool = True) -> None:
        """`rewinds`: whether a slot can be taken up before the end of what it holds."""
        self._count = count
        self._rewinds = rewinds
        self._free: OrderedDict[int, _Held] = OrderedDict((slot, _NOTHING) for slot in range(count))
        self._taken: dict[int, _Held] = {}
        self._computed: dict[int, int] = {}  # of a taken slot's tokens, whose KV is there

    @property
    def free(self) -> int:
        """Slots that a session could take."""
        return len(self._free)

    @property
    def warm(self) -> int:
        """Free slots that still hold somebody's KV."""
        return sum(bool(len(held.tokens)) for held in self._free.values())

    def keys(self) -> list[int]:
        """Of the beginnings of texts whose KV is here to be shared, of the texts that came last first; see
        outrider.core.prefixes. None where a slot's KV is of use to its own text alone."""
        taken = [(held, self._computed[slot]) for slot, held in reversed(self._taken.items())]
        free = [(held, len(held.tokens)) for held in reversed(self._free.values())]
        found: dict[int, None] = {}
        for held, rows in (*taken, *free) if self._rewinds else ():
            found.update((key, None) for length, key in zip(LENGTHS, held.keys, strict=False) if length <= rows)
        return [*found][:MOST]

    def take(self, tokens: Sequence[int], tenant: str, session: str = "") -> Taken:
        """A slot for a session over `tokens`, with as much of their KV as is there; the last token's is never counted.

        A slot that holds much more than the shared prefix is copied from and not taken, where another one is free,
        unless it is the session's own: what it computed beyond its log is of use to nobody. So is one that another
        session has. Raises Overloaded when no slot is free.
        """
        if not self._free:
            raise Overloaded(f"all {self._count} slots are in use; retry later")
        wanted = np.asarray(tokens[:-1], np.int64)
        place = self._find(wanted, tenant, session)
        self._taken[place.slot] = _Held(wanted, tenant, session)
        self._computed[place.slot] = place.cached
        return place

    def computed(self, slot: int, rows: int) -> None:
        """The KV of a taken slot's first `rows` tokens is there by the next pass, and stays while the slot is taken."""
        self._computed[slot] = rows

    def _find(self, wanted: NDArray[np.int64], tenant: str, session: str) -> Taken:
        best, cached = None, WORTHWHILE - 1
        for slot, held in self._free.items():
            shared = _shared(held.tokens, wanted) if held.tenant == tenant else 0
            if shared > cached and (self._rewinds or shared == len(held.tokens)):
                best, cached = slot, shared
        oldest = next(iter(self._free))
        if self._rewinds:
            for slot, held in self._taken.items():
                shared = min(_shared(held.tokens, wanted), self._computed[slot]) if held.tenant == tenant else 0
                if shared > cached:
                    best, cached = slot, shared
        if best is None:
            del self._free[oldest]
            return Taken(oldest, 0, None)
        if best in self._free and self._is_taken_over(best, cached, session):
            del self._free[best]
            return Taken(best, cached, None)
        del self._free[oldest]
        if best in self._free:
            self._free.move_to_end(best)
        return Taken(oldest, cached, best)

    def _is_taken_over(self, slot: int, cached: int, session: str) -> bool:
        """Whether a free slot that holds `cached` of a session's rows is better taken than copied from."""
        held = self._free[slot]
        own = bool(session) and held.session == session
        return own or slot == next(iter(self._free)) or len(held.tokens) - cached < WORTHWHILE

    def evict(self) -> int | None:
        """Of the free slots that hold something, the one that was used least recently, which holds nothing from now on.
        None: there is none such."""
        for slot, held in self._free.items():
            if len(held.tokens):
                self._free[slot] = _NOTHING
                self._free.move_to_end(slot, last=False)
                return slot
        return None

    def forget(self) -> None:
        """No slot holds anything any more."""
        self._free = OrderedDict.fromkeys(self._free, _NOTHING)
        self._computed = dict.fromkeys(self._taken, 0)

    def give_back(self, slot: int, tokens: Sequence[int], tenant: str, session: str = "") -> None:
        """A session ends; the slot's first rows hold the KV of `tokens`."""
        self._taken.pop(slot, None)
        self._computed.pop(slot, None)
        self._free[slot] = _Held(np.array(tokens, np.int64), tenant, session)
        if not tokens:
            self._free.move_to_end(slot, last=False)


def _shared(held: NDArray[np.int64], wanted: NDArray[np.int64]) -> int:
    """Length of the longest common prefix."""
    length = min(len(held), len(wanted))
    differ = np.flatnonzero(held[:length] != wanted[:length])
    return int(differ[0]) if len(differ) else length
