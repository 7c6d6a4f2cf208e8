"""Records work once and replays it: on CUDA as a graph, so that a pass is one call for the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

WARM_UPS = 3  # runs before a capture, which compile and choose kernels and allocate the workspaces of libraries

Replay = Callable[[], None]


class Recorder(Protocol):
    """Makes work repeatable over the same buffers."""

    def record(self, work: Callable[[], None]) -> Replay:
        """Run the work at least once, and return a function that repeats it."""


class NoRecorder:
    """Records nothing: each replay runs the work again. For CPUs, and where no graphs are wanted."""

    def record(self, work: Callable[[], None]) -> Replay:
        return work


class CudaGraphs:
    """Records CUDA graphs that share one memory pool: they run one at a time, and no memory outlives its graph's run.

    Work runs a few times before it is captured, so repeating it must change nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], None]) -> Replay:
        current = torch.cuda.current_stream(self._device)
        self._capture_stream.wait_stream(current)
        with torch.cuda.stream(self._capture_stream):
            for _ in range(WARM_UPS):
                work()
        current.wait_stream(self._capture_stream)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._capture_stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


def recorder_for(device: torch.device) -> Recorder:
    """Return what records the passes of a device."""
    return CudaGraphs(device) if device.type == "cuda" else NoRecorder()
