"""The budget of KV pages for the next pass, where memory holds fewer pages than all slots together could take."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.engine.interface.engine import Engine
from outrider.engine.kv.kv_slots import KvSlots

SPARE = 2  # pages of each session: both the first page that it writes and the first that rows move to may be shared


class PageBudget:
    """The pages of one engine. Its methods run between two passes, when all queued changes of KV are done."""

    def __init__(self, engine: Engine, slots: KvSlots) -> None:
        self._engine = engine
        self._slots = slots
        self._promised = 0
        self.bounded = engine.memory(0, 0, 0) is not None

    def open(self, reserved: int = 0) -> None:
        """Begin the budget of the next pass, which takes `reserved` pages beside those of texts."""
        self._promised = reserved

    def reserve(self, slot: int, first: int, end: int, preemptions: Iterator[object]) -> bool:
        """Reserve pages for a slot's rows [first, end). False: there are too few.

        To make room it releases the KV of ended sessions, the least recently used first, and then draws the next of
        `preemptions`, each of which releases the KV of a running session.
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
