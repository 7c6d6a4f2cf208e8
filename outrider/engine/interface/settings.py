"""What an engine is loaded with."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.engine.interface.engine import Dtype, Numerics
from outrider.engine.interface.features import Features
from outrider.engine.tensor_parallel.group import ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of an engine, whatever its kind; see `outrider.engine.loading.load_engine`."""

    dtype: Dtype
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
