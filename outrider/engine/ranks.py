"""An engine of several ranks: rank 0 leads and is the engine that others see; each step's plan goes to all at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.core.noise import Draw
from outrider.engine.batch import Segment
from outrider.engine.engine import Engine
from outrider.engine.group import Group, RankLost
from outrider.engine.logits import Logits
from outrider.engine.plan import Change, Copy, Move, Release, decode, encode

if TYPE_CHECKING:
    from torch import Tensor

BEAT_S = 1.0  # between two signs of life of a group that has nothing to do

_STOP = np.zeros(1, np.uint8)  # a message that is no plan: those are of whole numbers


class Leader(Engine):
    """Rank 0's engine as the whole. It makes KV changes at once; the others receive them with the next pass's plan.

    `forward` and `beat` may raise RankLost; the group is over then.
    """

    def __init__(self, engine: Engine, group: Group) -> None:
        super().__init__(engine)
        self.beat_s = BEAT_S
        self.ranks = group.shard.of
        self._engine = engine
        self._group = group
        self._changes: list[Change] = []

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        self.check_move(slot, source, destination)
        self._change(Move(slot, source, destination))

    def copy(self, source: int, target: int, rows: int) -> None:
        self.check_copy(source, target, rows)
        self._change(Copy(source, target, rows))

    def release(self, slot: int, rows: int) -> None:
        self._change(Release(slot, rows))

    def memory(self, slot: int, first: int, end: int) -> tuple[int, int] | None:
        return self._engine.memory(slot, first, end)  # all ranks have as many pages, and the same ones free

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        self._announce(segments)
        return self._engine.forward(segments)

    def judge(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        self._announce(segments)
        return self._engine.judge(segments, draws, best)

    def hidden(self) -> Tensor:
        return self._engine.hidden()

    def beat(self) -> None:
        self._group.send(encode((), ()))
        self._group.beat()

    def close(self) -> None:
        with suppress(RankLost):
            self._group.send(_STOP)

    def _announce(self, segments: Sequence[Segment]) -> None:
        """Sends the step's plan to the others, with the changes since the last one."""
        self.check_segments(segments)
        changes, self._changes = self._changes, []
        self._group.send(encode(changes, segments))

    def _change(self, change: Change) -> None:
        change.apply(self._engine)
        self._changes.append(change)


def lead(engine: Engine, group: Group) -> Engine:
    """The whole that this engine is rank 0's part of. Waits until all have loaded. Raises RankLost."""
    if group.shard.of == 1:
        return engine
    group.gather()
    return Leader(engine, group)


def follow(engine: Engine, group: Group) -> None:
    """Does on another rank what rank 0 plans, until that closes its engine. Raises RankLost."""
    group.gather()
    while len(message := group.receive()) != len(_STOP):
        changes, segments = decode(message)
        if not segments:
            group.beat()
            continue
        for change in changes:
            change.apply(engine)
        engine.forward(segments)
