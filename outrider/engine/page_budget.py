"""Pages of memory for the KV that the next pass writes, where there are fewer than all slots together could take."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.engine.engine import Engine
from outrider.engine.slots import Slots

SPARE = 2  # pages of each session: the first that it writes to, and the first that accepted rows move to, may be shared


class PageBudget:
    """Of one engine and its slots. Everything here is between two passes, with all changes of KV made."""

    def __init__(self, engine: Engine, slots: Slots) -> None:
        self._engine = engine
        self._slots = slots
        self._promised = 0
        self.bounded = engine.memory(0, 0, 0) is not None

    def open(self, reserved: int = 0) -> None:
        """The next pass is planned, which takes `reserved` pages beside those of texts."""
        self._promised = reserved

    def reserve(self, slot: int, first: int, end: int, preemptions: Iterator[object]) -> bool:
        """Keeps pages for a slot's rows [first, end). False: there are too few.

        KV of sessions that have ended is released for it, the least recently used first; then what each of the
        `preemptions` releases when it is asked for.
        """
        while True:
            memory = self._engine.memory(slot, first, min(end, self._engine.rows))
            if memory is None:
                return True
            needed, free = memory[0] + SPARE, memory[1]
            if self._promised + needed <= free:
                self._promised += needed
                return True
            evicted = self._slots.evict()
            if evicted is not None:
                self._engine.release(evicted, 0)
            elif next(preemptions, None) is None:
                return False
