"""The interface of a tensor-parallel group for engines, and the group of a single rank, which sends nothing.

`socket_group` beside this module connects the ranks of compiled engines, `process_group` those of engines on torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from outrider.engine.tensor_parallel.sharding import Shard
from outrider.errors import Unavailable

if TYPE_CHECKING:
    from torch import Tensor


class RankLost(Unavailable):
    """Another rank of the group has ended or does not answer. The group cannot be used any more."""


class Group(Protocol):
    """The ranks that compute one model together. All ranks call the same operations in the same order."""

    shard: Shard

    def send(self, message: NDArray[np.uint8]) -> None:
        """Send a message from rank 0 to all other ranks."""

    def receive(self) -> NDArray[np.uint8]:
        """Wait for rank 0's next message and return it."""

    def heartbeat(self) -> None:
        """Send a sign of life to all other ranks, and wait for theirs."""

    def barrier(self) -> None:
        """Wait until all ranks have called this, for up to an hour."""

    def close(self) -> None:
        """Close all connections."""


@runtime_checkable
class TensorGroup(Group, Protocol):
    """A group whose engines run on torch."""

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, float32: the same bits on every rank."""

    def all_gather(self, part: Tensor) -> Tensor:
        """Return all ranks' parts side by side: [rows, n] -> [rows, n * ranks]."""

    def gather(self, part: Tensor) -> Tensor | None:
        """Return all ranks' parts as `all_gather` does, on rank 0 alone; None on the others."""

    def finish(self) -> None:
        """Wait until the device has done what this thread gave it, where a stalled rank could keep it for ever."""


class SingleRank:
    """A group of one rank."""

    shard = Shard()

    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor) -> Tensor | None:
        return part

    def finish(self) -> None:
        """Return at once: no other rank can stall the device."""

    def send(self, message: NDArray[np.uint8]) -> None:
        """Do nothing: there are no others."""

    def receive(self) -> NDArray[np.uint8]:
        raise RankLost("a group of one rank has no other rank to receive from")

    def heartbeat(self) -> None:
        """Do nothing: there are no others."""

    def barrier(self) -> None:
        """Return at once: there are no others."""

    def close(self) -> None:
        """Do nothing: there are no connections."""


ALONE = SingleRank()
