"""What a device must have for the engine, and what runs on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.gpu.kernels import Kernels
from outrider.engine.gpu.passes.cuda_graphs import Recorder, Replay, recorder_for
from outrider.engine.gpu.weights import DeviceDtype
from outrider.engine.tensor_parallel.group import ALONE, TensorGroup
from outrider.errors import ConfigError

C_COMPILERS = ("cc", "gcc", "clang")  # Triton compiles a launcher for each kernel
CAPABILITIES: dict[DeviceDtype, tuple[int, int]] = {
    "float8": (8, 9),
    "bfloat16": (8, 0),
    "float32": (7, 0),
    "int4": (8, 0),
}


@dataclass(slots=True)
class Runtime:
    """Where an engine computes, and with what."""

    device: torch.device
    kernels: Kernels
    recorder: Recorder
    group: TensorGroup = ALONE  # the ranks that share the model

    @classmethod
    def on(cls, device: torch.device, group: TensorGroup = ALONE) -> Runtime:
        """Return the runtime of a device. Raises ConfigError where a CUDA device lacks what its kernels need."""
        return cls(device, kernels_for(device), recorder_for(device), group)

    def record(self, work: Callable[[], None]) -> Replay:
        """Run the work at least once, and return a function that repeats it."""
        return self.recorder.record(work)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute on this device, which torch keeps for each thread, and without gradients."""
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with torch.inference_mode(), on_device:
            yield

    def sent(self, numbers: NDArray[np.int64]) -> Tensor:
        """Return numbers that are on their way to the device."""
        host = torch.from_numpy(numbers)
        # torch keeps pinned memory until the copy has read it.
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host


def check_capability(device: torch.device, dtype: DeviceDtype) -> None:
    """Raise ConfigError when a CUDA device has no arithmetic for a type."""
    if device.type != "cuda":
        return
    has = torch.cuda.get_device_capability(device)
    if has < (needed := CAPABILITIES[dtype]):
        possible = next((other for other, least in CAPABILITIES.items() if has >= least), None)
        advice = "use another device" if possible is None else f"use {possible}"
        raise ConfigError(
            f"dtype: {dtype} needs a CUDA device of capability {needed[0]}.{needed[1]}, and {device} has "
            f"{has[0]}.{has[1]}; {advice}"
        )


@contextmanager
def fitting(device: torch.device) -> Iterator[None]:
    """Raise ConfigError for what does not fit into a device's memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        problem = str(error).partition(". ")[0]
        raise ConfigError(f"device: {device} has too little memory for this model: {problem}; lower slots") from None


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels of a device. Raises ConfigError where a CUDA device lacks what its kernels need."""
    if device.type == "cpu":
        from outrider.engine.gpu import torch_kernels

        return torch_kernels
    if find_spec("triton") is None:
        raise ConfigError("device: cuda needs Triton, which comes with torch's builds for CUDA; install one of those")
    compilers = [os.environ["CC"]] if "CC" in os.environ else C_COMPILERS
    if not any(map(shutil.which, compilers)):
        raise ConfigError(f"device: cuda needs a C compiler, and there is no {' or '.join(compilers)}; install gcc")
    from outrider.engine.gpu import triton_kernels

    return triton_kernels


def check_device(name: str) -> torch.device:
    """Return the device of that name. Raises ConfigError when this machine does not have it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: is '{name}', must be cpu, cuda, or cuda:N") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"device: is '{name}', must be cpu, cuda, or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(f"device: there is no {name} here: torch sees {count} CUDA device{'' if count == 1 else 's'}")
    return torch.device("cuda", device.index or 0)
