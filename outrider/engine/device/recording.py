"""Work that is recorded once and replayed: on CUDA as a graph, so that a pass is one call for the host."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

import torch

WARM_UPS = 3  # before a capture: kernels are compiled and chosen, and libraries take their workspaces

MadeT = TypeVar("MadeT")
Replay = Callable[[], None]


class Recorder(Protocol):
    """How work becomes something that can be repeated over the same buffers."""

    def record(self, work: Callable[[], None]) -> Replay:
        """Does the work at least once, and gives what repeats it."""


class Unrecorded:
    """Does the work anew every time: on CPUs, and where no graphs are wanted."""

    def record(self, work: Callable[[], None]) -> Replay:
        return work


class CudaGraphs:
    """CUDA graphs that share one memory pool: they run one after the other, and nothing in it outlives its graph's run.

    Work runs a few times before it is captured, so it must be such that repeating it changes nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], None]) -> Replay:
        present = torch.cuda.current_stream(self._device)
        self._aside.wait_stream(present)
        with torch.cuda.stream(self._aside):
            for _ in range(WARM_UPS):
                work()
        present.wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"):
            work()
        return graph.replay


class Recent(Generic[MadeT]):
    """Things that are made when they are first asked for; the least recently used are let go."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: OrderedDict[Hashable, MadeT] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], MadeT]) -> MadeT:
        """What was made for the key."""
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        while len(self._made) >= self._most:
            self._made.popitem(last=False)
        self._made[key] = made = make()
        return made

    def __len__(self) -> int:
        return len(self._made)
