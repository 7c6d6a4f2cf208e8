"""One pass of EAGLE's layer over rows of many slots, and the KV that it keeps of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.attention import FastAttention, attend_runs
from outrider.engine.batch import Segment
from outrider.engine.cache import KVCache
from outrider.engine.heads.eagle import Attend, Eagle, Eagle3
from outrider.engine.heads.ends import Ends
from outrider.engine.heads.latest import sayable
from outrider.engine.heads.shape import Shape
from outrider.engine.heads.speculator import FloatRows
from outrider.engine.packing import Packed, pack, rows_of
from outrider.engine.rope import Rope
from outrider.engine.weights import complex_turns


class EagleLayer:
    """The network between the target's two ends. One call at a time."""

    def __init__(self, network: Eagle | Eagle3, shape: Shape, ends: Ends, *, slots: int, rows: int) -> None:
        """`rows`: of a slot."""
        self._network = network
        self._shape = shape
        self._ends = ends
        self._cache = KVCache(1, slots, shape.kv_heads, rows, shape.head_dim)
        self._attention = FastAttention(shape.heads, shape.kv_heads)
        self._turns = complex_turns(Rope(shape.theta, None), rows, shape.head_dim)

    @property
    def kv_bytes(self) -> int:
        """Taken when every row has been written."""
        return self._cache.bytes

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copies KV rows [0, rows) of one slot to another."""
        self._cache.copy(source, target, rows)

    def run(self, segments: Sequence[Segment], states: Tensor) -> Tensor:
        """The states of the rows that are wanted: [wanted, width]. `states`: of the rows before those of the segments,
        in order."""
        packed = pack(segments)
        before = states.new_zeros(len(packed.tokens), states.shape[1])
        before[rows_of(packed, segments)] = states
        turns = self._turns[packed.positions]
        given = self._network(self._ends.embed(packed.tokens), before, turns, self._attend(packed))
        chosen: Tensor = given if packed.outputs is None else given[packed.outputs]
        return chosen[: packed.outputs_used]

    def said(self, states: Tensor) -> FloatRows:
        """What follows rows of these states: logits [rows, vocabulary]."""
        return sayable(self._network.logits(states, self._ends.unembed), self._ends)

    def _attend(self, packed: Packed) -> Attend:
        calls = [self._attention.prepare(run) for run in packed.runs]
        views = [self._cache.views(run) for run in packed.runs]
        write = self._cache.writer(packed.written)
        form = self._shape
        group = form.heads // form.kv_heads

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            write(0, torch.stack([key, value], 1)[: packed.used])
            folded = query.view(-1, form.kv_heads, group, form.head_dim).transpose(1, 2).flatten(1)  # group first
            found = attend_runs(folded, packed, calls, [(keys[0], values[0]) for keys, values in views])
            return found.view(-1, group, form.kv_heads, form.head_dim).transpose(1, 2).flatten(1)

        return attend
