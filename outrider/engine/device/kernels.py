"""The functions that a pass is made of, as they are written or compiled for a device; which attention is fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from outrider.engine.device import attention, choosing, layers
from outrider.engine.device.attention import Attend

TRIALS = 20  # of a kernel that is timed
SHAPES = 256  # at which a function may be compiled
# Products with one row become reductions, which read weights faster; the rest is what max-autotune means. Graphs are
# ours, over the whole pass.
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "max_autotune": True,
    "coordinate_descent_tuning": True,
    "triton.cudagraphs": False,
}


class Kernels:
    """Written functions, which run anywhere."""

    attends: Sequence[Attend] = (attention.fused,)
    begin: Callable[..., Any] = staticmethod(layers.begin)
    between: Callable[..., Any] = staticmethod(layers.between)
    end: Callable[..., Any] = staticmethod(layers.end)
    scores: Callable[..., Tensor] = staticmethod(choosing.scores)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Attend:
        """The fastest way to compute attention over arguments of these shapes."""
        return self.attends[0]


class DeviceKernels(Kernels):
    """On CUDA without a compiler: attention may still be one of two."""

    attends: Sequence[Attend] = (attention.fused, attention.products)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Attend:
        if len(self.attends) == 1:
            return self.attends[0]
        times = {index: _seconds(partial(way, queries, keys, values, seen)) for index, way in enumerate(self.attends)}
        return self.attends[min(times, key=times.__getitem__)]


class CompiledKernels(DeviceKernels):
    """Compiled by torch, one kernel for each shape."""

    def __init__(self, *, fused_sums: bool, tuned: bool = True) -> None:
        """`fused_sums`: no other rank has a part in sums, so what is around them is one function.

        `tuned`: try many kernels for each product, which takes a minute for each size of a pass.
        """
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
        torch._dynamo.config.accumulated_recompile_limit = max(
            torch._dynamo.config.accumulated_recompile_limit, 8 * SHAPES
        )
        options = OPTIONS if tuned else None

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            made: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True, options=options)
            return made

        self.begin = compiled(layers.begin)
        if fused_sums:
            self.between = compiled(layers.between)
            self.end = compiled(layers.end)
        self.scores = torch.compile(choosing.scores, dynamic=False, fullgraph=True)
        ways = (attention.products, attention.flexible)
        self.attends = (attention.fused, *(torch.compile(way, dynamic=False, fullgraph=True) for way in ways))


def can_compile(device: torch.device) -> bool:
    """Whether there is a compiler for it."""
    return device.type == "cuda" and find_spec("triton") is not None


def _seconds(work: Callable[[], object]) -> float:
    """On the device, the mean of some runs; infinite for what cannot be done there."""
    try:
        for _ in range(3):
            work()
    except Exception:  # a compiler may fail in its own ways, and another kernel does
        return float("inf")
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(TRIALS):
        work()
    stop.record()
    stop.synchronize()
    taken: float = start.elapsed_time(stop)
    return taken / TRIALS
