"""How the ranks of a tensor-parallel group on torch exchange their parts, over torch.distributed.

On CPUs, gloo: every rank sends its part straight to the others, and all add in the order of ranks. A sum is then the
same bits on all of them whatever its size, and takes one step; gloo's own collectives go around a ring and took two
to five times as long (docs/performance.md). On GPUs, NCCL's collectives; messages still go by gloo.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from fcntl import ioctl

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.group import RankLost
from outrider.engine.sharding import Shard

TIMEOUT_S = 15.0  # for another rank to arrive at the same operation; it is computing the same
MEETING = timedelta(minutes=2)  # for all ranks to come to where they meet
GATHER = timedelta(hours=1)  # for all ranks to have loaded
FRAME = 8192  # bytes of a message's first frame; few messages have a second one

_LENGTH = 8  # bytes, at a message's beginning
_SIOCGIFADDR = 0x8915  # asks for an interface's address (Linux)
_TAG = 0  # messages between two ranks arrive in the order in which they were sent


class Ranks:
    """A group over torch.distributed, of this process's default process group."""

    def __init__(
        self, rank: int, of: int, meeting: str, *, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S
    ) -> None:
        """Meets the other ranks at `meeting`, "tcp://HOST:PORT" on rank 0's host. Waits for all of them.

        `host`: this rank's own address, that the others reach it at.

        Raises RankLost when they do not come.
        """
        self.shard = Shard(rank, of)
        self._others = [other for other in range(of) if other != rank]
        self._timeout = timedelta(seconds=timeout_s)
        os.environ["GLOO_SOCKET_IFNAME"] = _interface(host)
        with self._reaching():
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=of, timeout=MEETING)
        assert dist.group.WORLD is not None
        self._ranks = dist.group.WORLD

    def sum(self, part: Tensor) -> Tensor:
        first, *rest = self._exchange(part)
        total = first.float() + rest[0] if rest else first.float()
        for other in rest[1:]:
            total.add_(other)
        return total

    def join(self, part: Tensor) -> Tensor:
        return torch.cat(self._exchange(part), -1)

    def collect(self, part: Tensor) -> Tensor | None:
        with self._reaching():
            if self.shard.rank:
                self._wait([self._ranks.send([part.contiguous()], 0, _TAG)])
                return None
            parts = [part, *(torch.empty_like(part) for _ in self._others)]
            self._wait(self._from(parts))
            return torch.cat(parts, -1)

    def send(self, message: NDArray[np.uint8]) -> None:
        frame = np.zeros(max(FRAME, _LENGTH + len(message)), np.uint8)
        frame[:_LENGTH].view(np.int64)[0] = len(message)
        frame[_LENGTH : _LENGTH + len(message)] = message
        whole = torch.from_numpy(frame)
        frames = [whole[:FRAME]] if len(whole) == FRAME else [whole[:FRAME], whole[FRAME:]]
        with self._reaching():
            self._wait([work for frame in frames for work in self._to(frame)])

    def receive(self) -> NDArray[np.uint8]:
        with self._reaching():
            first = self._receive(FRAME)
            length = int(first[:_LENGTH].view(np.int64)[0])
            message = first[_LENGTH : _LENGTH + length]
            missing = length - len(message)
            return np.concatenate([message, self._receive(missing)]) if missing else message

    def beat(self) -> None:
        self._exchange(torch.zeros(1))

    def gather(self) -> None:
        self._exchange(torch.zeros(1), GATHER)

    def close(self) -> None:
        dist.destroy_process_group()

    def _receive(self, size: int) -> NDArray[np.uint8]:
        frame = torch.empty(size, dtype=torch.uint8)
        self._wait([self._ranks.recv([frame], 0, _TAG)])
        return frame.numpy()

    def _exchange(self, part: Tensor, patience: timedelta | None = None) -> list[Tensor]:
        """The parts of all ranks, in their order."""
        part = part.contiguous()
        parts = [part if rank == self.shard.rank else torch.empty_like(part) for rank in range(self.shard.of)]
        with self._reaching():
            self._wait([*self._to(part), *self._from(parts)], patience)
        return parts

    def _to(self, part: Tensor) -> list[dist.Work]:
        """Begins to send it to all others."""
        return [self._ranks.send([part], other, _TAG) for other in self._others]

    def _from(self, parts: Sequence[Tensor]) -> list[dist.Work]:
        """Begins to receive theirs."""
        return [self._ranks.recv([parts[other]], other, _TAG) for other in self._others]

    def _wait(self, under_way: Sequence[dist.Work], patience: timedelta | None = None) -> None:
        for work in under_way:
            work.wait(patience or self._timeout)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:  # what torch.distributed raises for a broken or silent connection
            raise RankLost(
                f"rank {self.shard.rank} of {self.shard.of} has lost another one: {str(error).splitlines()[0]}"
            ) from error


class CudaRanks(Ranks):
    """Ranks with a GPU each: what is on it goes by NCCL, in the order of its stream, and the host waits for nothing.

    So a recorded pass holds its sums. Messages and signs of life still go by gloo.
    """

    def __init__(
        self,
        rank: int,
        of: int,
        meeting: str,
        *,
        device: torch.device,
        host: str = "127.0.0.1",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """As `Ranks`; `device`: this rank's own."""
        super().__init__(rank, of, meeting, host=host, timeout_s=timeout_s)
        torch.cuda.set_device(device)
        with self._reaching():
            self._cards = dist.new_group(backend="nccl", timeout=self._timeout)

    def sum(self, part: Tensor) -> Tensor:
        if part.device.type == "cpu":
            return super().sum(part)
        total = part.to(torch.float32, copy=True)
        with self._reaching():
            dist.all_reduce(total, group=self._cards)
        return total

    def join(self, part: Tensor) -> Tensor:
        if part.device.type == "cpu":
            return super().join(part)
        parts = part.new_empty((self.shard.of, *part.shape))
        with self._reaching():
            dist.all_gather_into_tensor(parts, part.contiguous(), group=self._cards)
        return parts.movedim(0, -2).flatten(-2)

    def collect(self, part: Tensor) -> Tensor | None:
        if part.device.type == "cpu":
            return super().collect(part)
        whole = self.join(part)
        return None if self.shard.rank else whole


def _interface(host: str) -> str:
    """The network interface that has an address; gloo is told by name. Raises RankLost when there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an address
                if socket.inet_ntoa(ioctl(asking, _SIOCGIFADDR, request)[20:24]) == host:
                    return name
    raise RankLost(f"no network interface here has the address {host}")
