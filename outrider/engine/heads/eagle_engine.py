"""EAGLE heads away from their target: an engine that drafts from the features that the verifier sends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.batch import Segment
from outrider.engine.cache import lazy_zeros
from outrider.engine.checkpoint import ModelConfig, read_config, read_tokenizer_digest
from outrider.engine.engine import SCRATCH, Engine, Traits
from outrider.engine.heads.eagle import Eagle, Eagle3
from outrider.engine.heads.eagle_layer import EagleLayer
from outrider.engine.heads.ends import Ends, read_ends
from outrider.engine.heads.folder import load_network, pack_linears
from outrider.engine.heads.fusing import check_eagle
from outrider.engine.heads.loading import heads_dtype
from outrider.engine.heads.shape import Shape
from outrider.engine.threads import Threads


class EagleEngine(Engine):
    """Row j of a slot stands for token j and the fused features of the token before it, as they are fed; behind the
    text, where nodes are drafted, for the state that its parent's row has given.

    Rows whose features were not fed are left out: they have no KV, and nothing sees them. They are a text's first ones,
    the very first always: the KV of a slot begins with the first row that there is. A pass that goes on with a text
    takes the nodes behind it for gone, so their rows are never moved.
    """

    def __init__(
        self,
        network: Eagle | Eagle3,
        shape: Shape,
        ends: Ends,
        config: ModelConfig,
        digest: bytes,
        *,
        dtype: torch.dtype,
        slots: int,
        threads: int,
    ) -> None:
        """`config`: the target's; `digest`: of its tokenizer."""
        rows = config.context + SCRATCH
        if shape.own_head:
            ends = ends.below(shape.vocabulary)
        self._layer = EagleLayer(network, shape, ends, slots=slots, rows=rows)
        own = sum(parameter.numel() for parameter in network.parameters())
        parameters = own + (0 if shape.own_head else shape.width * shape.vocabulary)
        super().__init__(
            Traits(
                vocabulary=config.vocabulary,
                context=config.context,
                positions=rows,
                rows=rows,
                slots=slots,
                parameters=parameters,
                dtype=str(dtype).removeprefix("torch."),
                numerics="fast",
                tokenizer_digest=digest,
                eos_ids=config.eos_ids,
                weight_bytes=parameters * dtype.itemsize,
                kv_bytes=self._layer.kv_bytes,
                fed=shape.width,
                sayable=ends.sayable,
            )
        )
        pack_linears(network, dtype)
        self._before = lazy_zeros(slots, rows, shape.width, dtype=torch.bfloat16)  # features of the token before
        self._fed = [(rows, rows)] * slots  # the rows of a text that have them, the first and the one behind the last
        self._base = [0] * slots  # the first row that has KV
        self._given: list[dict[int, Tensor]] = [{} for _ in range(slots)]  # states that rows have given: [width]
        self._threads = Threads(threads)

    @classmethod
    def load(cls, folder: Path, target: Path, *, precise: bool, slots: int, threads: int) -> EagleEngine:
        """A folder's heads, with the two ends of `target`, the rest of which is not read. Raises as `check_eagle`."""
        check_eagle(folder, target)
        torch.set_num_threads(threads)
        dtype = heads_dtype(precise=precise)
        shape, network = load_network(folder)
        assert isinstance(network, Eagle | Eagle3)
        ends, digest = read_ends(target, dtype), read_tokenizer_digest(target)
        return cls(network, shape, ends, read_config(target), digest, dtype=dtype, slots=slots, threads=threads)

    def feed(self, slot: int, start: int, rows: NDArray[np.uint16], *, anew: bool) -> None:
        rows = rows[: max(0, self.rows - start)]
        stop = start + len(rows)
        self._before[slot, start:stop] = torch.from_numpy(rows.astype(np.int16)).view(torch.bfloat16)
        self._fed[slot] = start if anew else self._fed[slot][0], stop

    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        self.check_segments(segments)
        self._threads.prepare()
        present = [known for segment in segments if (known := self._known(segment)) is not None]
        if not present:
            return np.empty((0, self.vocabulary), np.float32)
        with torch.inference_mode():
            states = torch.cat([self._states(segment) for segment in present])
            given = self._layer.run([self._placed(segment) for segment in present], states)
            first = 0
            for segment in present:
                self._remember(segment, given[first : first + segment.outputs])
                first += segment.outputs
            return self._layer.said(given) if first else np.empty((0, self.vocabulary), np.float32)

    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        raise NotImplementedError

    def copy(self, source: int, target: int, rows: int) -> None:
        self.check_copy(source, target, rows)
        with torch.inference_mode():
            self._layer.copy(source, target, max(0, rows - self._base[source]))
        self._base[target] = self._base[source]

    def _known(self, segment: Segment) -> Segment | None:
        """What is left of it without rows whose features are not known. Then the KV before them is of no use."""
        slot = segment.slot
        start = max(segment.prefix, self._fed[slot][0])
        if max(start, self._base[slot]) > segment.prefix:
            self._base[slot] = start
        skipped = start - segment.prefix
        if not skipped:
            return segment
        if skipped > len(segment.tokens) - max(1, segment.outputs):
            if segment.outputs:
                raise ValueError(f"segment of slot {slot}: wants rows whose features were not fed")
            return None
        mask = None if segment.mask is None else segment.mask[skipped:, skipped:]
        return Segment(slot, start, segment.tokens[skipped:], segment.positions[skipped:], mask, segment.outputs)

    def _placed(self, segment: Segment) -> Segment:
        """As the layer has it, whose KV begins with the first row that there is, and whose positions are those of the
        features."""
        before = segment.prefix - self._base[segment.slot]
        return Segment(segment.slot, before, segment.tokens, segment.positions - 1, segment.mask, segment.outputs)

    def _states(self, segment: Segment) -> Tensor:
        """That its rows go on from: [rows, width]."""
        slot, end = segment.slot, self._fed[segment.slot][1]
        rows = _rows(segment)
        text = self._before[slot, rows.start : min(rows.stop, end)].float()
        if rows.start < end:
            self._given[slot].clear()  # the text goes on: what was drafted behind it is gone
        above = [self._given[slot][_parent(segment, row)] for row in rows if row >= end]
        return torch.cat([text, torch.stack(above)]) if above else text

    def _remember(self, segment: Segment, given: Tensor) -> None:
        """The states of its wanted rows, for the nodes below them."""
        rows = _rows(segment)
        self._given[segment.slot].update(zip(rows[len(rows) - len(given) :], given, strict=True))


def _rows(segment: Segment) -> range:
    """The slot's rows that it writes."""
    stop = segment.prefix + segment.span
    return range(stop - len(segment.tokens), stop)


def _parent(segment: Segment, row: int) -> int:
    """The row before a node's own on its path."""
    at = row - segment.prefix
    assert segment.mask is not None
    seen = np.flatnonzero(segment.mask[at - segment.span + len(segment.tokens), :at])
    return segment.prefix + int(seen[-1]) if len(seen) else segment.prefix - 1
