"""The functions that a pass is made of, as they are written or compiled for a device; which attention is fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from outrider.engine.device import attention, choosing, layers
from outrider.engine.device.attention import Attend
from outrider.engine.device.recording import Recorder

TRIALS = 16  # of a kernel that is timed, in a recording
ROUNDS = 4  # of that
SHAPES = 256  # at which a function may be compiled
# Products with one row become reductions, which read weights faster; the rest is what max-autotune means. Graphs are
# ours, over the whole pass.
OPTIONS = {
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

    def attend(self, recorder: Recorder, *arguments: Tensor) -> Attend:
        """The fastest way to compute attention over arguments of these shapes: queries, keys, values, what is seen."""
        if len(self.attends) == 1:
            return self.attends[0]
        times = [_seconds(partial(way, *arguments), recorder) for way in self.attends]
        return self.attends[times.index(min(times))]


class DeviceKernels(Kernels):
    """On CUDA without a compiler: attention may still be one of two."""

    attends: Sequence[Attend] = (attention.fused, attention.products)


class CompiledKernels(DeviceKernels):
    """Compiled by torch, for every number of rows anew: seconds each, when a pass first has so many.

    What depends on a pass's context, too, is only compiled when tuned: new contexts come as texts grow.
    """

    def __init__(self, *, fused_sums: bool, tuned: bool, backend: str = "inductor") -> None:
        """`fused_sums`: no other rank has a part in sums, so what is around them is one function.

        `tuned`: try many kernels for each product, which takes up to a minute for each number of rows, and compile
        attention, seconds for each bucket. `backend`: torch's name for the compiler.
        """
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
        torch._dynamo.config.accumulated_recompile_limit = max(
            torch._dynamo.config.accumulated_recompile_limit, 8 * SHAPES
        )

        def compiled(function: Callable[..., Any], options: dict[str, Any] | None = None) -> Callable[..., Any]:
            made: Callable[..., Any] = torch.compile(
                function, dynamic=False, fullgraph=True, backend=backend, options=options
            )
            return made

        options = OPTIONS if tuned and backend == "inductor" else None
        self.begin = compiled(layers.begin, options)
        if fused_sums:
            self.between = compiled(layers.between, options)
            self.end = compiled(layers.end, options)
        self.scores = compiled(choosing.scores)
        if tuned:
            self.attends = (attention.fused, compiled(attention.products), compiled(attention.flexible))


def can_compile(device: torch.device) -> bool:
    """Whether there is a compiler for it."""
    return device.type == "cuda" and find_spec("triton") is not None


def _seconds(work: Callable[[], object], recorder: Recorder) -> float:
    """Of many runs, recorded together so that the host's part does not count; infinite for what cannot be done."""

    def repeatedly() -> None:
        for _ in range(TRIALS):
            work()

    try:
        replay = recorder.record(repeatedly)
        replay()
    except Exception:  # a compiler may fail in its own ways, and then another kernel is taken
        return float("inf")
    _settle()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        replay()
    _settle()
    return time.perf_counter() - began


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
