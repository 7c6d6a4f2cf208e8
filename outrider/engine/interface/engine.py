"""The interface of all engines: a model, the KV of its sessions, and packed passes over rows of many sessions."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from outrider.config import KvType
from outrider.core.construction.expansion import CANDIDATES
from outrider.core.sampling.noise import Draw
from outrider.engine.adapters.low_rank import AdapterLoader, NoAdapters
from outrider.engine.following import FollowingPass
from outrider.engine.growth import GrownLevel, Growth
from outrider.engine.interface.batch import Segment, check_numbers
from outrider.engine.interface.features import Features
from outrider.engine.interface.logits import HostLogits, Logits
from outrider.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from outrider.engine.adapters.low_rank import LowRankAdapter
    from outrider.engine.heads.speculator import Speculator

Numerics = Literal["fast", "invariant"]
# Of the layers' linears; stored: each in the type that its file has.
Dtype = Literal["float32", "bfloat16", "float8", "int8", "int4", "stored"]
PAGE = 16  # rows of KV, where it lies in pages
SCRATCH = 256  # cache rows of a slot beyond the context, for nodes that are not committed yet


@dataclass(kw_only=True)
class Traits:
    """The properties of an engine.

    Callers report them, or choose by them once, at the start. The flags are for work that callers prepare for a pass:
    an engine without one takes the same call, and the work would be in vain.
    """

    vocabulary: int
    context: int  # longest text, in tokens
    positions: int  # a row's position is one of 0 .. positions - 1
    rows: int  # cache rows of a slot
    slots: int
    parameters: int
    dtype: str  # of the weights; where they are as stored, the type of most of them
    numerics: Numerics
    tokenizer_digest: bytes
    eos_ids: tuple[int, ...]
    weight_bytes: int  # bytes that one rank reads in a pass
    kv_bytes: int  # of one rank, when all slots are full, or the bound on it
    # Reason why this engine cannot verify trees or rewind a slot; "" if it can.
    treeless: str = ""
    # Whether a session can go on before the end of the text that its slot holds. Layers with a state in the place of
    # keys and values have it for the last tokens alone.
    rewinds: bool = True
    kv_dtype: KvType = "auto"  # of keys and values
    kv_tokens: int = 0  # tokens whose KV fits into memory; 0: the contexts of all slots
    ranks: int = 1  # number of ranks that share the model
    unpadded_vocabulary: int = 0  # ids from this one on are padding, whose logits are -inf; 0: there is no padding
    samples_tokens: bool = False  # whether `sample` chooses tokens, so that the caller need not compute their noise
    restricts_tokens: bool = False  # whether `sample` applies filters; penalties only where it returns two candidates
    grows_trees: bool = False  # whether `grow` runs several levels of trees in one call
    begins_next_pass: bool = False  # whether `run_on` begins the pass that follows
    compiles_sizes: bool = True  # whether the first pass of a size compiles kernels for it
    frees_host: bool = False  # whether a pass runs on a device, so that the CPU is free meanwhile
    heartbeat_s: float | None = None  # seconds between calls of `heartbeat` while no pass runs; None: no calls
    features: Features | None = None  # the features that passes return beside logits; None: no features
    computed_by: str = ""  # what runs its passes, and the reason where that is the slower choice
    fed_width: int = 0  # width of the target's fused features that `feed` takes; 0: the engine needs none


def check_kv_memory(memory: int, minimum: int, rows: int) -> None:
    """Raise ConfigError where one text of a slot's `rows`, and its tree, would not fit into `memory` bytes."""
    if memory < minimum:
        raise ConfigError(
            f"kv_memory: {memory} bytes are too few for one text of {rows - SCRATCH} tokens; "
            f"give at least {minimum}, or a shorter context"
        )


class Engine(Traits, ABC):
    """A model and the KV of its sessions. One call at a time, from any thread.

    A slot needs no opening: a pass never sees rows beyond those that its segment names.
    """

    speculator: Speculator | None = None  # heads that were loaded with the engine
    adapters: AdapterLoader = NoAdapters("this engine has none; use the native backend")

    def __init__(self, traits: Traits) -> None:
        super().__init__(**{field.name: getattr(traits, field.name) for field in fields(Traits)})
        self.unpadded_vocabulary = self.unpadded_vocabulary or self.vocabulary

    @property
    def types(self) -> str:
        """The types of weights and of KV: a text goes on only where both are equal."""
        return self.dtype if self.kv_dtype == "auto" else f"{self.dtype}/kv-{self.kv_dtype}"

    @abstractmethod
    def forward(self, segments: Sequence[Segment]) -> NDArray[np.float32]:
        """Run one pass: write the segments' KV rows and return their logits, [total wanted, vocabulary], in order.

        Raises ValueError when a segment does not fit the engine or two share a slot.
        """

    def sample(self, segments: Sequence[Segment], draws: Sequence[Draw | None], best: int = 0) -> Logits:
        """Run one pass as `forward` does; an engine that `samples_tokens` also chooses tokens.

        `draws`: for each segment how its tokens are drawn; None: the engine chooses none for it.
        `best`: how many leading tokens of each row are returned; 0: only the tokens of those rows that the chosen
        tokens lead to, from a segment's first row on, which is what a verifier needs.
        """
        return HostLogits(self.forward(segments))

    def run_on(
        self, segments: Sequence[Segment], draws: Sequence[Draw | None], following: FollowingPass
    ) -> tuple[Logits, frozenset[int]]:
        """Run one pass as `sample` does for a verifier, and begin the one that follows, if it is wanted then.

        Return the logits, and the slots of what was begun. The next call of `sample` or `run_on` for the very rows
        that were begun, or for some of them, only waits for them. A call for other rows has all computed anew, as has
        a change of one of the slots those of this slot. Nothing is begun by an engine that does not `begins_next_pass`.
        """
        return self.sample(segments, draws), frozenset()

    def grow(
        self, segments: Sequence[Segment], draws: Sequence[Draw | None], growths: Sequence[Growth | None], levels: int
    ) -> tuple[Logits, list[GrownLevel]]:
        """Run one pass as `sample` does for a drafter's candidates, and `levels` further levels of trees behind it.

        `growths`: of each segment, None where it has no tree or does not grow. Return the logits of the pass, and the
        levels, of those segments that grow; none where the engine cannot grow them all at once, or does not
        `grows_trees`. Raises ValueError for levels that do not fit the slot.
        """
        return self.sample(segments, draws, CANDIDATES), []

    def load_adapter(self, folder: Path) -> tuple[object, LowRankAdapter]:
        """Return an adapter for segments, and what was read. May be called while a pass runs, from any thread.

        The adapter is dropped with the last reference to it. Raises CheckpointError; ConfigError where the engine has
        no adapters; Unavailable where other ranks cannot be reached.
        """
        return self.adapters.load(folder)

    def hidden(self) -> Tensor:
        """Return the features of the last pass, valid until the next one: [rows, width * parts] float32.

        The rows are all rows of its segments in order, or those whose logits were wanted (`Features.all_rows`). Raises
        ValueError for an engine without `features`.
        """
        raise ValueError("this engine was loaded without features")

    def feed(self, slot: int, start: int, rows: NDArray[np.uint16], *, restart: bool) -> None:
        """Store fused features of a text of the target: for each token from `start` on those of the token before it.

        `rows`: [tokens, fed_width], the bits of bfloat16. `restart`: the text is a new one, or begins again. An engine
        whose `fed_width` is 0 needs none.
        """

    @abstractmethod
    def move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        """Copy KV rows of a slot, in all layers: row source[i] to row destination[i].

        The two may overlap: all rows are read before one is written. Raises ValueError for a row or slot out of range.
        """

    @abstractmethod
    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy KV rows [0, rows) of one slot to another, in all layers: for forks and shared prefixes.

        The target slot loses its rows behind them. Raises ValueError for a slot or a number of rows out of range.
        """

    def release(self, slot: int, rows: int) -> None:
        """Release a slot's KV rows from `rows` on."""

    def memory(self, slot: int, first: int, end: int) -> tuple[int, int] | None:
        """Return how many pages of memory writing a slot's rows [first, end) takes at most, and how many are free.

        None: there is memory for all slots. May not be called while a pass runs.
        """
        return None

    def heartbeat(self) -> None:
        """Exchange a sign of life with the other processes of an engine, to notice a lost one while no pass runs."""

    def close(self) -> None:
        """Release what other processes hold for this engine. No call may follow."""

    def measure_costs(
        self, tokens: Sequence[int], context: int = 256, repeats: int = 5, within_s: float = math.inf
    ) -> list[tuple[int, float]]:
        """Return the seconds of a pass over n rows of one session behind `context` rows, for each n of `tokens`.

        The fastest of `repeats` passes counts, because whatever else the machine does only adds time. Each round
        measures all n, so that a busy moment does not fall on one n alone. Overwrites rows of the last slot. Where a
        slot has too few rows, the context is shorter, and an n that does not fit at all is left out. An engine that
        cannot rewind a slot is measured without a context, because it would have to read that again each time.

        A pass that would not end in `within_s` seconds is left out, but for one each of the first two n: of a slow
        model the largest n have no pass, and are not returned.
        """
        context = context if self.rewinds and not self.treeless else 0
        segments = {}
        for count in tokens:
            if 1 <= count < self.rows:
                prefix = min(context, self.rows - count, self.context - 1)
                zeros = np.zeros(count, np.int64)
                segments[count] = Segment(self.slots - 1, prefix, zeros, np.arange(prefix, prefix + count))
                if self.compiles_sizes:
                    self._try(segments[count])
        fastest: dict[int, float] = {}
        until = time.perf_counter() + within_s
        for _ in range(repeats):
            took = 0.0
            for count, segment in segments.items():
                start = time.perf_counter()
                if len(fastest) >= 2 and start + fastest.get(count, took) > until:
                    break
                self._try(segment)
                took = time.perf_counter() - start
                fastest[count] = min(fastest.get(count, took), took)
        self.release(self.slots - 1, 0)
        return list(fastest.items())

    def _try(self, segment: Segment) -> None:
        """Run the pass whose cost `measure_costs` measures, as a step runs it."""
        self.forward([segment])

    def check_segments(self, segments: Sequence[Segment]) -> None:
        """Raise ValueError when the segments of a pass do not fit the engine."""
        if not segments:
            raise ValueError("a pass needs at least one segment")
        for segment in segments:
            segment.check(slots=self.slots, rows=self.rows)
        check_numbers(segments, self.vocabulary, self.positions)
        if len({segment.slot for segment in segments}) != len(segments):
            raise ValueError("two segments of a pass share a slot")

    def check_move(self, slot: int, source: NDArray[np.int64], destination: NDArray[np.int64]) -> None:
        """Raise ValueError for a row or slot out of range."""
        if not 0 <= slot < self.slots or source.shape != destination.shape or source.ndim != 1:
            raise ValueError(f"cannot move {source.shape} rows to {destination.shape} in slot {slot}")
        for name, index in (("source", source), ("destination", destination)):
            if len(index) and (index.min() < 0 or index.max() >= self.rows):
                raise ValueError(f"{name}: a row outside 0 .. {self.rows - 1}")

    def check_copy(self, source: int, target: int, rows: int) -> None:
        """Raise ValueError for a slot or a number of rows out of range."""
        for name, slot in (("source", source), ("target", target)):
            if not 0 <= slot < self.slots:
                raise ValueError(f"{name}: slot {slot} is not one of the engine's {self.slots}")
        if not 0 <= rows <= self.rows:
            raise ValueError(f"cannot copy {rows} rows of a slot that has {self.rows}")
