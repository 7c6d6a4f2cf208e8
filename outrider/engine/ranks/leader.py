"""An engine of several ranks: rank 0 is the engine for callers, and sends the plan of each pass to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling.noise import Draw
from outrider.engine.batch import Segment
from outrider.engine.engine import Engine
from outrider.engine.logits import Logits
from outrider.engine.ranks.group import Group, RankLost
from outrider.engine.ranks.rank_messages import Change, CopyRows, MoveRows, ReleaseRows, decode, encode

if TYPE_CHECKING:
    from torch import Tensor

BEAT_S = 1.0  # seconds between the signs of life of an idle group

_STOP = np.zeros(1, np.uint8)  # ends a follower; no plan has this length, because plans consist of 64-bit numbers


class Leader(Engine):
    """The engine of a whole group, on rank 0. It changes KV at once; the others receive changes with the next pass.

    `forward` and `heartbeat` may raise RankLost, after which the group cannot be used.
    """

    def __init__(self, engine: Engine, group: Group) -> None:
        super().__init__(engine)
        self.heartbeat_s = BEAT_S
        self.ranks = group.shard.of
        self._engine = engine
        self._group = group
        self._changes: list[Change] = []

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        self.check_move(slot, source, destination)
        self._change(MoveRows(slot, source, destination))

    def copy(self, source: int, target: int, rows: int) -> None:
        self.check_copy(source, target, rows)
        self._change(CopyRows(source, target, rows))

    def release(self, slot: int, rows: int) -> None:
        self._change(ReleaseRows(slot, rows))

    def memory(self, slot: int, first: int, end: int) -> tuple[int, int] | None:
        return self._engine.memory(slot, first, end)  # all ranks have equally many pages, and the same ones are free

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        self._send_plan(segments)
        return self._engine.forward(segments)

    def sample(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        self._send_plan(segments)
        return self._engine.sample(segments, draws, best)

    def hidden(self) -> Tensor:
        return self._engine.hidden()

    def heartbeat(self) -> None:
        self._group.send(encode((), ()))
        self._group.heartbeat()

    def close(self) -> None:
        with suppress(RankLost):
            self._group.send(_STOP)

    def _send_plan(self, segments: Sequence[Segment]) -> None:
        """Send the segments of a pass to the other ranks, with the KV changes since the last pass."""
        self._engine.check_segments(segments)  # before the others begin what this rank would refuse
        changes, self._changes = self._changes, []
        self._group.send(encode(changes, segments))

    def _try(self, segment: Segment) -> None:
        if self.samples:
            self.sample([segment], [Draw(0, 0.0)])
        else:
            self.forward([segment])

    def _change(self, change: Change) -> None:
        """Change the KV of this rank, and queue the change for the others."""
        change.apply(self._engine)
        self._changes.append(change)


def lead(engine: Engine, group: Group) -> Engine:
    """Return the engine of the whole group, of which `engine` is rank 0's part.

    Waits until all ranks have loaded. Raises RankLost.
    """
    if group.shard.of == 1:
        return engine
    group.barrier()
    return Leader(engine, group)


def follow(engine: Engine, group: Group) -> None:
    """Run the plans of rank 0 on another rank, until rank 0 closes its engine. Raises RankLost."""
    group.barrier()
    while len(message := group.receive()) != len(_STOP):
        changes, segments = decode(message)
        if not segments:
            group.heartbeat()
            continue
        for change in changes:
            change.apply(engine)
        engine.forward(segments)
