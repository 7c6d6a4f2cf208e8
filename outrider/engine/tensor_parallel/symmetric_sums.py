"""Sums over the GPUs of one machine in one kernel: each rank reads the parts of all others, and adds them.

NCCL's sum of few numbers is a round of messages, and a step has two sums a layer. Where the GPUs can read one another's
memory, torch's symmetric memory does without: parts lie at places that all ranks know. All ranks add in the same order.

torch calls it alpha. So ranks use it only if all of them get NCCL's sums by it when they start; else they use NCCL.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)

MOST_BYTES = 512 * 1024  # of a part; what is larger is NCCL's: each rank would read once for every rank
ALIGNED = 4  # numbers; the kernel reads sixteen bytes at once
CHECKED = (ALIGNED, 4096, MOST_BYTES // 4)  # numbers of the sums that are compared
ROUNDING = 1e-5  # float32 sums of a few ranks in another order


class Sums(Protocol):
    """The group operations that are used to set this up."""

    def agree(self, own: bool) -> bool:
        """Return whether `own` is true on every rank."""

    def names(self, own: str) -> Sequence[str]:
        """Return the names of all ranks' machines."""

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts by NCCL, float32."""


class SymmetricSums:
    """A buffer that the other ranks can read, and the sums over it."""

    def __init__(self, symmetric: ModuleType, group_name: str, device: torch.device) -> None:
        """`symmetric`: torch's module. Raises RuntimeError where the devices or this build of torch do not offer it."""
        self._name = group_name
        self._buffer: Tensor = symmetric.empty(MOST_BYTES // 4, dtype=torch.float32, device=device)
        self._mapping: Any = symmetric.rendezvous(self._buffer, group_name)
        self._sum: Callable[[Tensor, str, str], Tensor] = torch.ops.symm_mem.one_shot_all_reduce

    def fits(self, part: Tensor) -> bool:
        """Return whether a part is small enough, and of a size that the kernel takes."""
        return part.numel() <= len(self._buffer) and part.numel() % ALIGNED == 0

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, which all have this shape: float32. In stream order, without a wait."""
        own = self._buffer[: part.numel()]
        own.copy_(part.reshape(-1))
        return self._sum(own, "sum", self._name).view(part.shape)


def find_symmetric_sums(
    ranks: Sums, make: Callable[[], SymmetricSums], rank: int, device: torch.device
) -> SymmetricSums | None:
    """Return sums that all ranks have found to be right; None, with the reason in the log, if one has not."""
    if len(set(ranks.names(socket.gethostname()))) > 1:
        log.info("sums over NCCL alone: the ranks are on several machines")
        return None
    sums, problem = None, ""
    try:
        sums = make()
    except (RuntimeError, ValueError, ImportError, AttributeError, TypeError) as error:
        problem = str(error).partition("\n")[0]
    if not ranks.agree(sums is not None):
        log.info("sums over NCCL alone: symmetric memory is not there%s", problem and f": {problem}")
        return None
    assert sums is not None
    if not ranks.agree(_are_right(sums, ranks, rank, device)):
        log.warning("sums over NCCL alone: those over symmetric memory differ from NCCL's")
        return None
    log.info("sums of up to %d KiB over symmetric memory", MOST_BYTES // 1024)
    return sums


def _are_right(sums: SymmetricSums, ranks: Sums, rank: int, device: torch.device) -> bool:
    """Return whether our sums of several sizes are those of NCCL, up to rounding."""
    chance = torch.Generator(device).manual_seed(rank)
    right = True
    for count in CHECKED:
        part = torch.randn(count, generator=chance, device=device)
        widest = (sums.all_reduce(part) - ranks.all_reduce(part)).abs().max()
        right = right and bool(widest <= ROUNDING)
    return right
