"""The ranks of a tensor-parallel group, as engines see them, and the group of one rank, which sends nothing.

`outrider.engine.socket_group` has the ranks of compiled engines, `outrider.engine.process_group` those of engines on
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from outrider.engine.sharding import Shard
from outrider.errors import Unavailable

if TYPE_CHECKING:
    from torch import Tensor


class RankLost(Unavailable):
    """Another rank of the group is gone or does not answer. The group is of no use any more."""


class Group(Protocol):
    """The ranks that compute one model together. All call the same operations in the same order."""

    shard: Shard

    def send(self, message: NDArray[np.uint8]) -> None:
        """From rank 0 to all others."""

    def receive(self) -> NDArray[np.uint8]:
        """What rank 0 sends; waits for it."""

    def beat(self) -> None:
        """A sign of life from each rank to all others; waits for theirs."""

    def gather(self) -> None:
        """Waits until all ranks are here, be it long."""

    def close(self) -> None:
        """Ends all connections."""


@runtime_checkable
class TensorGroup(Group, Protocol):
    """Ranks whose engines are on torch."""

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, float32: the same bits on every rank."""

    def join(self, part: Tensor) -> Tensor:
        """All ranks' parts side by side: [rows, n] -> [rows, n * ranks]."""

    def collect(self, part: Tensor) -> Tensor | None:
        """As `join`, on rank 0 alone; None on the others."""


class Alone:
    """A group of one."""

    shard = Shard()

    def sum(self, part: Tensor) -> Tensor:
        return part

    def join(self, part: Tensor) -> Tensor:
        return part

    def collect(self, part: Tensor) -> Tensor | None:
        return part

    def send(self, message: NDArray[np.uint8]) -> None:
        """There are no others."""

    def receive(self) -> NDArray[np.uint8]:
        raise RankLost("a group of one has nobody to receive from")

    def beat(self) -> None:
        """There are no others."""

    def gather(self) -> None:
        """All are here."""

    def close(self) -> None:
        """Nothing to end."""


ALONE = Alone()
