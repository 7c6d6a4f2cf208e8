"""What every engine promises: a model, the KV of its sessions, and one packed pass over rows of many of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from outrider.core.noise import Draw
from outrider.engine.batch import Segment
from outrider.engine.features import Features
from outrider.engine.logits import HostLogits, Logits

if TYPE_CHECKING:
    from torch import Tensor

Numerics = Literal["fast", "invariant"]
Dtype = Literal["float32", "bfloat16", "int8", "int4"]  # of the layers' linears
PAGE = 16  # rows of KV, where it lies in pages
SCRATCH = 256  # cache rows of a slot beyond the context, for nodes that are not committed yet


@dataclass(kw_only=True)
class Traits:
    """What an engine says of itself."""

    vocabulary: int
    context: int  # longest text, in tokens
    positions: int  # that a row may have, 0 .. positions - 1
    rows: int  # cache rows of a slot
    slots: int
    parameters: int
    dtype: str  # of the weights
    numerics: Numerics
    tokenizer_digest: bytes
    eos_ids: tuple[int, ...]
    weight_bytes: int  # that a pass reads, of one rank
    kv_bytes: int  # when all slots are full, or all that there may be, of one rank
    treeless: str = ""  # why it can take no trees, and slots only from their beginning or where they end; "": it can
    kv_tokens: int = 0  # that there is memory for; 0: for all slots' contexts
    ranks: int = 1  # that share the model
    sayable: int = 0  # ids from there on are padding, whose logits are -inf; 0: there are none such
    draws: bool = False  # whether `judge` chooses tokens, so that their noise need not be computed elsewhere
    beat_s: float | None = None  # how often `beat` wants to be called while there is nothing to do; None: never
    features: Features | None = None  # that passes give beside logits; None: none
    computed_by: str = ""  # what runs its passes, and where that is the slower way, why
    fed: int = 0  # width of the target's fused features, which it must be fed; 0: it needs none


class Engine(Traits, ABC):
    """A model and the KV of its sessions. One call at a time, from any thread.

    A slot needs no opening: what lies beyond the rows that a segment names is never seen.
    """

    def __init__(self, traits: Traits) -> None:
        super().__init__(**{field.name: getattr(traits, field.name) for field in fields(Traits)})
        self.sayable = self.sayable or self.vocabulary

    @abstractmethod
    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        """One pass. Writes the segments' KV rows; gives their logits: [total wanted, vocabulary], in order.

        Raises ValueError when a segment does not fit the engine or two share a slot.
        """

    def judge(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        """As `forward`. `draws`: of each segment how its tokens are drawn, where an engine may do that.

        `best`: how many of each row's leading tokens are wanted then; 0: the tokens of the rows alone that one meets
        who follows them from a segment's first, as a verifier does.
        """
        return HostLogits(self.forward(segments))

    def hidden(self) -> Tensor:
        """The features of the last pass, until the next one: [rows, width * parts] float32, of all rows of its segments
        in order, or of those whose logits were wanted. Only of an engine that has `features`."""
        raise NotImplementedError

    def feed(self, slot: int, start: int, rows: NDArray[np.uint16], *, anew: bool) -> None:
        """Takes fused features of a text of the target: for each token from `start` on those of the token before it,
        [tokens, fed] in the bits of bfloat16. `anew`: the text is another one than the slot's, or begins anew. Only of
        an engine that is `fed`."""
        raise NotImplementedError

    @abstractmethod
    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        """Copies KV rows of a slot, in all layers: row source[i] to row destination[i].

        The two may overlap: every row is read before one is written. Raises ValueError for a row or slot out of range.
        """

    @abstractmethod
    def copy(self, source: int, target: int, rows: int) -> None:
        """Copies KV rows [0, rows) of one slot to another, in all layers: for forks and shared prefixes. What the other
        held behind them is lost.

        Raises ValueError for a slot or a number of rows out of range.
        """

    def release(self, slot: int, rows: int) -> None:
        """A slot's KV rows from `rows` on are not needed any more."""

    def memory(self, slot: int, first: int, end: int) -> tuple[int, int] | None:
        """For writing a slot's rows [first, end): how many pages of memory that takes at most, and how many are free.

        None: there is memory for all slots. Not while a pass runs.
        """
        return None

    def beat(self) -> None:
        """Called while there is nothing to do, so that an engine of several processes learns that one is gone."""

    def close(self) -> None:
        """Lets go of what others hold for this engine. There may be no call after it."""

    def measure_costs(self, tokens: Sequence[int], context: int = 256, repeats: int = 5) -> list[tuple[int, float]]:
        """Seconds of a pass over n rows of one session behind `context` rows, for each n: the fastest of `repeats`.

        The fastest, because whatever else the machine does only adds time; in rounds over all n, so that a busy
        moment does not fall on one n alone. Overwrites rows of the last slot. Where a slot has too few rows, `context`
        is taken shorter, and an n that does not fit at all is left out. Without trees there are no rows before: they
        would have to be read each time.
        """
        context = 0 if self.treeless else context
        segments = {}
        for count in tokens:
            if 1 <= count < self.rows:
                prefix = min(context, self.rows - count, self.context - 1)
                zeros = np.zeros(count, np.int64)
                segments[count] = Segment(self.slots - 1, prefix, zeros, np.full(count, prefix, np.int64))
                self._try(segments[count])  # oneDNN compiles its kernels for this size
        fastest = dict.fromkeys(segments, float("inf"))
        for _ in range(repeats):
            for count, segment in segments.items():
                start = time.perf_counter()
                self._try(segment)
                fastest[count] = min(fastest[count], time.perf_counter() - start)
        self.release(self.slots - 1, 0)
        return list(fastest.items())

    def _try(self, segment: Segment) -> None:
        """A pass whose cost is measured: as a step would have it."""
        self.forward([segment])

    def check_segments(self, segments: Sequence[Segment]) -> None:
        """Raises ValueError when a pass does not fit the engine."""
        if not segments:
            raise ValueError("a pass needs at least one segment")
        for segment in segments:
            segment.check(slots=self.slots, rows=self.rows, vocabulary=self.vocabulary, positions=self.positions)
        if len({segment.slot for segment in segments}) != len(segments):
            raise ValueError("two segments of a pass share a slot")

    def check_move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        """Raises ValueError for a row or slot out of range."""
        if not 0 <= slot < self.slots or source.shape != destination.shape or source.ndim != 1:
            raise ValueError(f"cannot move {source.shape} rows to {destination.shape} in slot {slot}")
        for name, index in (("source", source), ("destination", destination)):
            if len(index) and (index.min() < 0 or index.max() >= self.rows):
                raise ValueError(f"{name}: a row outside 0 .. {self.rows - 1}")

    def check_copy(self, source: int, target: int, rows: int) -> None:
        """Raises ValueError for a slot or a number of rows out of range."""
        for name, slot in (("source", source), ("target", target)):
            if not 0 <= slot < self.slots:
                raise ValueError(f"{name}: slot {slot} is not one of the engine's {self.slots}")
        if not 0 <= rows <= self.rows:
            raise ValueError(f"cannot copy {rows} rows of a slot that has {self.rows}")
