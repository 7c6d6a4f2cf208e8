"""The compiled engine for CPUs. The sources are in outrider/engine/cpu/src."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from outrider.core.sampling.noise import Draw
from outrider.engine.checkpoints.stored_tensors import FileRows
from outrider.engine.interface.batch import Segment

Array = NDArray[Any]
# An array; or the name of a type, with rows in a file or blocks of rows; and the input of each column, where they are
# not in order.
Weight = Array | tuple[str, FileRows] | tuple[str, Array] | tuple[str, Array, Array]

def instruction_sets() -> list[str]: ...
def quantize(kind: str, values: Array, blocks: Array, /) -> None: ...
def logprobs(logits: Array, tokens: Array, scores: Array, /) -> float: ...

class Sampler:
    def __init__(
        self,
        vocabulary: int,
        base: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        penalties: tuple[float, float, float],
        biased: Array,
        bias: Array,
        banned: Array,
        allowed: Array,
        restricted: bool,
        stops: Array,
        first_stop: int,
        /,
    ) -> None: ...
    def extend(self, tokens: Array, answer: bool, /) -> None: ...
    def lead(self, logits: Array, path: Array, noised: bool, tokens: Array, scores: Array, /) -> int: ...

class Adapter:
    def __init__(self, dtype: str, width: int, queries: int, keys: int, ffn: int, layers: int, /) -> None: ...
    def set(self, layer: int, part: int, /, *weights: Array | None) -> None: ...

class Model:
    def __init__(
        self,
        dtype: str,
        head_dtype: str,
        kv_dtype: str,
        shape: tuple[int, int, int, int, int, int, int, int, int, int, int, float, int],
        parts: tuple[float, float, float, float, float, int, bool, bool, str, Sequence[int], Sequence[int]],
        experts: tuple[int, int, int, bool, int],
        delta: tuple[object, ...],
        cosines: Array,
        sines: Array,
        threads: int,
        instructions: str,
        features: Sequence[int],
        every: bool,
        ranks: tuple[int, float, Sequence[int]],
        /,
    ) -> None: ...
    def set_layer(self, index: int, weights: dict[str, Weight], /) -> None: ...
    def set_expert(self, index: int, expert: int, gate: Weight, up: Weight, down: Weight, /) -> None: ...
    def set_ends(
        self, embedding: Weight | None, norm: Weight, head: Weight, head_ids: Sequence[int] = (), /
    ) -> None: ...
    def run(
        self,
        segments: Sequence[Segment],
        draws: Sequence[Draw | None],
        best: int,
        walks: bool,
        logits: Array,
        tokens: Array,
        scores: Array,
        features: Array | None,
        /,
    ) -> None: ...
    def move(self, slot: int, source: Array, target: Array, /) -> None: ...
    def copy(self, source: int, target: int, rows: int, /) -> None: ...
    def release(self, slot: int, rows: int, /) -> None: ...
    def pages(self, slot: int, first: int, end: int, /) -> tuple[int, int]: ...
    def sizes(self) -> dict[str, Any]: ...
