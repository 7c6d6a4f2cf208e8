"""An engine of several ranks: rank 0 is the engine for callers, and sends the plan of each pass to the other ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.noise import Draw
from outrider.engine.interface.batch import Segment
from outrider.engine.interface.engine import Engine
from outrider.engine.interface.logits import Logits
from outrider.engine.tensor_parallel.adapter_transfer import AdapterInbox, AdapterOutbox, SharedAdapter, SharedAdapters
from outrider.engine.tensor_parallel.group import Group, RankLost
from outrider.engine.tensor_parallel.rank_messages import (
    AdapterPiece,
    Change,
    DropAdapter,
    KvChange,
    decode,
    encode,
)

if TYPE_CHECKING:
    from torch import Tensor

BEAT_S = 1.0  # seconds between the signs of life of an idle group

_STOP = np.zeros(1, np.uint8)  # ends a follower; no plan has this length, because plans consist of 64-bit numbers


class Leader(Engine):
    """The engine of a whole group, on rank 0. It changes KV at once; the others receive changes with the next message.

    `forward`, `heartbeat` and `load_adapter` may raise RankLost, after which the group cannot be used.
    """

    def __init__(self, engine: Engine, group: Group) -> None:
        super().__init__(engine)
        self.heartbeat_s = BEAT_S
        self.ranks = group.shard.of
        self.speculator = engine.speculator
        self._engine = engine
        self._group = group
        self._changes: list[Change] = []
        self._outbox = AdapterOutbox()
        self.adapters = SharedAdapters(engine.adapters, self._outbox, self._pace_heartbeats)
        self._pacing = threading.Lock()

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        self._change(KvChange("move", (slot,), (source, destination)))

    def copy(self, source: int, target: int, rows: int) -> None:
        self._change(KvChange("copy", (source, target, rows)))

    def release(self, slot: int, rows: int) -> None:
        self._change(KvChange("release", (slot, rows)))

    def memory(self, slot: int, first: int, end: int) -> tuple[int, int] | None:
        return self._engine.memory(slot, first, end)  # all ranks have equally many pages, and the same ones are free

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        with self._using_group():
            return self._engine.forward(self._send_plan(segments))

    def sample(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        with self._using_group():
            return self._engine.sample(self._send_plan(segments), draws, best)

    def hidden(self) -> Tensor:
        return self._engine.hidden()

    def heartbeat(self) -> None:
        with self._using_group():
            self._send(())
            self._group.heartbeat()

    def close(self) -> None:
        self._outbox.close("the engine of the ranks that share the model has been closed")
        with suppress(RankLost):
            self._group.send(_STOP)

    def _send_plan(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Send the segments of a pass to the other ranks, and return them with this rank's parts of their adapters."""
        adapters = [it.adapter for it in segments if it.adapter is not None]
        if not adapters:
            numbered = own = segments
        else:
            for it in adapters:
                if not isinstance(it, SharedAdapter) or it.sent_by is not self._outbox:
                    raise ValueError(f"an adapter of another engine: {it!r}")
            numbered, own = [
                [it if it.adapter is None else replace(it, adapter=getattr(it.adapter, name)) for it in segments]
                for name in ("number", "part")
            ]
        self._engine.check_segments(own)  # before the others begin what this rank would refuse
        self._send(numbered)
        return own

    def _send(self, segments: Sequence[Segment]) -> None:
        """Send a message: the changes since the last one, and segments, which have adapters' numbers."""
        changes, self._changes = [*self._changes, *self._outbox.changes()], []
        self._group.send(encode(changes, segments))
        self._outbox.sent(changes)
        self._pace_heartbeats()

    def _pace_heartbeats(self) -> None:
        """Have heartbeats follow one another at once while pieces of an adapter wait for a message."""
        with self._pacing:
            self.heartbeat_s = 0.0 if self._outbox.pending else BEAT_S

    @contextmanager
    def _using_group(self) -> Iterator[None]:
        """Wake the callers that wait for the group where it is lost."""
        try:
            yield
        except RankLost as error:
            self._outbox.close(str(error))
            raise

    def _try(self, segment: Segment) -> None:
        if self.samples_tokens:
            self.sample([segment], [Draw(0, 0.0)])
        else:
            self.forward([segment])

    def _change(self, change: KvChange) -> None:
        """Change the KV of this rank, and queue the change for the others."""
        change.apply(self._engine)
        self._changes.append(change)


def lead(engine: Engine, group: Group) -> Engine:
    """Return the engine of the whole group, of which `engine` is rank 0's part.

    Wait until all ranks have loaded. Raises RankLost.
    """
    if group.shard.of == 1:
        return engine
    group.barrier()
    return Leader(engine, group)


def follow(engine: Engine, group: Group) -> None:
    """Run the plans of rank 0 on another rank, until rank 0 closes its engine.

    Raises RankLost, and Unavailable where this rank cannot load an adapter that rank 0 could.
    """
    group.barrier()
    adapters = AdapterInbox(engine, f"rank {group.shard.rank} of {group.shard.of}")
    try:
        while len(message := group.receive()) != len(_STOP):
            changes, segments = decode(message)
            for change in changes:
                if isinstance(change, AdapterPiece | DropAdapter):
                    adapters.apply(change)
                else:
                    change.apply(engine)
            adapters.check()
            if segments:
                engine.forward(adapters.with_adapters(segments))
            else:
                group.heartbeat()
    finally:
        adapters.close()
