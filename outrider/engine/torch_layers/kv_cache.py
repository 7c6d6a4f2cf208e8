"""Memory of a KV cache on a CPU."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def lazy_zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros in pages that the system maps at their first use; torch.zeros would write all of them.

    The pages are small: otherwise the first row of a head would take two megabytes in each layer, and the time to clear
    them.
    """
    buffer = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # not on all systems
        buffer.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)
