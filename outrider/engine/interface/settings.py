"""What an engine is loaded with."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.config import KvType
from outrider.engine.interface.engine import SCRATCH, Dtype, Numerics
from outrider.engine.interface.features import Features
from outrider.engine.layer_selection import kept_layers
from outrider.engine.tensor_parallel.group import ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of an engine, whatever its kind; see `outrider.engine.loading.load_engine`.

    Raises ValueError for an engine that could hold no text.
    """

    dtype: Dtype
    kv_dtype: KvType = "auto"
    device: str = "cpu"
    layers: int | None = None
    skip: Collection[int] = ()
    numerics: Numerics = "fast"
    slots: int
    rows: int | None = None
    threads: int | None = None
    group: Any = ALONE  # of the kind that `connect_ranks` returns for the engine
    features: Features | None = None
    progress: Callable[[float], None] | None = None
    kv_memory: int | None = None  # bytes for the KV of all slots together; None: as much as they can take, or there is
    adapters: int = 0  # most that a device holds, for which KV leaves memory; 0: `load_adapter` is refused there
    instructions: str = ""  # instruction set of the compiled kernels; "": the best one
    heads: Path | None = None  # a folder of EAGLE heads for `DeviceEagleDrafts`

    def __post_init__(self) -> None:
        if self.slots < 1 or (self.rows is not None and self.rows < 2):
            raise ValueError(f"an engine needs a slot and two rows, not {self.slots} slots and {self.rows} rows")

    def kept_layers(self, count: int) -> tuple[int, ...]:
        """Return which of a checkpoint's `count` layers the engine has. Raises ConfigError."""
        kept = kept_layers(count, self.layers, self.skip)
        if self.features is not None:
            self.features.check(len(kept))
        return kept

    def rows_for(self, context: int) -> int:
        """Return the cache rows of a slot, for a checkpoint whose longest text has `context` tokens."""
        return context + SCRATCH if self.rows is None else self.rows
