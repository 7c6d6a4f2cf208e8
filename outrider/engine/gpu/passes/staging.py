"""Numbers on their way to a device: a buffer on the host, one on the device, and copies that no one waits for.

Neither buffer ever moves, so recorded graphs read the one on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SMALL = np.dtype(np.int32)
INTEGER = np.dtype(np.int64)
FLOAT = np.dtype(np.float64)
FLAG = np.dtype(np.bool_)
_TORCH = {SMALL: torch.int32, INTEGER: torch.int64, FLOAT: torch.float64, FLAG: torch.bool}


class Field(NamedTuple):
    """The place of an array in the buffers."""

    kind: np.dtype[Any]
    shape: tuple[int, ...]
    start: int  # in bytes
    stop: int


def placed(shapes: Sequence[tuple[np.dtype[Any], tuple[int, ...]]], start: int = 0) -> Iterator[Field]:
    """Yield places one behind another; each begins at a multiple of sixteen bytes."""
    for kind, shape in shapes:
        start = -(-start // 16) * 16
        stop = start + prod(shape) * kind.itemsize
        yield Field(kind, shape, start, stop)
        start = stop


class Staging:
    """The two buffers."""

    def __init__(self, size: int, device: torch.device) -> None:
        """`size`: in bytes."""
        pinned = device.type == "cuda"
        self.host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._bytes: NDArray[np.uint8] = self.host.numpy()

    def array(self, field: Field) -> NDArray[Any]:
        """Return an array on the host. `wait` before it is written."""
        return self._bytes[field.start : field.stop].view(field.kind).reshape(field.shape)

    def tensor(self, field: Field) -> Tensor:
        """Return the same array on the device."""
        return self.device[field.start : field.stop].view(_TORCH[field.kind]).reshape(field.shape)

    def wait(self) -> None:
        """Wait until the last copy has read the buffer on the host."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy(self, *stretches: tuple[int, int]) -> None:
        """Begin to copy stretches of bytes, each from its start to its stop."""
        for start, stop in stretches:
            self.device[start:stop].copy_(self.host[start:stop], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
