"""Graph capture without a GPU: a recording's operations are taken down, and a replay repeats them and nothing else.

As with a captured graph, a replay runs no Python of the engine: it reads and writes the very tensors that the recording
did. A shape or a number that the host had read, or a buffer that was made anew, would show as a wrong result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.engine.gpu.passes.cuda_graphs import Recorder

DEVICE = os.environ.get("OUTRIDER_TEST_DEVICE", "cpu")  # where these tests run the device's engine
ON_GPU = DEVICE != "cpu"
WARM_UPS = 2
READ_BY_HOST = ("_local_scalar_dense", "nonzero", "item", "equal", "unique", "masked_select", "is_nonzero")


@dataclass
class Operation:
    function: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: list[Tensor]

    def repeat(self) -> None:
        results = self.function(*self.arguments, **self.named)
        for old, new in zip(self.results, tree_leaves(results), strict=True):
            if old.data_ptr() != new.data_ptr():  # else a view, or done in place
                old.copy_(new)


class Writing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.tape: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.tape.append(Operation(func, args, kwargs or {}, [it for it in tree_leaves(results) if it is not None]))
        return results


class Tapes:
    """A recorder as CUDA's: it warms up, captures, and replays what it captured."""

    def __init__(self) -> None:
        self.tapes: list[list[Operation]] = []
        self.replays = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        for _ in range(WARM_UPS):
            work()
        with Writing() as writing:
            work()
        self.tapes.append(writing.tape)

        def replay() -> None:
            self.replays += 1
            for operation in writing.tape:
                operation.repeat()

        return replay

    @property
    def operations(self) -> list[str]:
        """The names of the operations of all tapes."""
        return [str(operation.function) for tape in self.tapes for operation in tape]

    def check_that_the_host_reads_nothing(self) -> None:
        read = [name for name in self.operations if any(reader in name for reader in READ_BY_HOST)]
        assert self.operations
        assert not read, read


class Graphs(Tapes):
    """Counts the recordings of a GPU. Its capture refuses by itself what the host would have to read."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = self._recorder.record(work)
        self.tapes.append([])

        def replay() -> None:
            self.replays += 1
            graph()

        return replay

    def check_that_the_host_reads_nothing(self) -> None:
        assert self.tapes


def taped(engine: Any) -> Tapes:
    """Has an engine record as if it were on a GPU, unless it is on one."""
    engine.recorder = tapes = Graphs(engine.recorder) if ON_GPU else Tapes()
    return tapes
