"""The functions of a pass, eager or compiled for a device, and the choice of the fastest attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from outrider.engine.device import attention, layers, sampling
from outrider.engine.device.attention import Attend
from outrider.engine.device.cuda_graphs import Recorder

TRIALS = 16  # runs of a timed kernel in one recording
ROUNDS = 4  # replays of that recording
SHAPES = 256  # maximum of shapes that a function is compiled for
# Products with one row become reductions, which read weights faster; the other options are those of max-autotune.
# Outrider itself records graphs, over the complete pass.
OPTIONS = {
    "max_autotune": True,
    "coordinate_descent_tuning": True,
    "triton.cudagraphs": False,
}


class Kernels:
    """The eager functions, which run on all devices."""

    attends: Sequence[Attend] = (attention.fused,)
    begin: Callable[..., Any] = staticmethod(layers.begin)
    between: Callable[..., Any] = staticmethod(layers.between)
    end: Callable[..., Any] = staticmethod(layers.end)
    scores: Callable[..., Tensor] = staticmethod(sampling.scores)

    def attend(self, recorder: Recorder, *arguments: Tensor) -> Attend:
        """Return the fastest attention for arguments of these shapes: queries, keys, values, mask."""
        if len(self.attends) == 1:
            return self.attends[0]
        times = [_seconds(partial(attend, *arguments), recorder) for attend in self.attends]
        return self.attends[times.index(min(times))]


class DeviceKernels(Kernels):
    """The functions on CUDA without a compiler, with two kinds of attention."""

    attends: Sequence[Attend] = (attention.fused, attention.products)


class CompiledKernels(DeviceKernels):
    """The functions compiled by torch, for each number of rows: this takes seconds when a pass first has so many rows.

    Attention, which also depends on a pass's context, is compiled only when `tuned`: new contexts come as texts grow.
    """

    def __init__(self, *, fused_sums: bool, tuned: bool, backend: str = "inductor") -> None:
        """`fused_sums`: sums include no other rank, so that one function contains them.

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
        self.scores = compiled(sampling.scores)
        if tuned:
            self.attends = (attention.fused, compiled(attention.products), compiled(attention.flexible))


def can_compile(device: torch.device) -> bool:
    """Return whether torch has a compiler for a device."""
    return device.type == "cuda" and find_spec("triton") is not None


def _seconds(work: Callable[[], object], recorder: Recorder) -> float:
    """Return the seconds of many runs, recorded together to exclude the host's part; infinite where `work` fails."""

    def repeatedly() -> None:
        for _ in range(TRIALS):
            work()

    try:
        replay = recorder.record(repeatedly)
        replay()
    except Exception:  # a compiler may raise anything; another kernel is chosen then
        return float("inf")
    _synchronize()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        replay()
    _synchronize()
    return time.perf_counter() - began


def _synchronize() -> None:
    """Wait until the device has done all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
