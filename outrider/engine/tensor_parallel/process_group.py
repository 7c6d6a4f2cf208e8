"""The tensor-parallel groups of engines on torch: ranks exchange their parts over torch.distributed.

On CPUs they use gloo. Every rank sends its part straight to the others, and all add in the order of ranks. So a sum has
the same bits on all ranks whatever its size, and takes one exchange; gloo's own collectives go around a ring and took
two to five times as long (docs/performance.md). On GPUs ranks use NCCL's collectives; messages still go over gloo.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from fcntl import ioctl
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.tensor_parallel.group import RankLost
from outrider.engine.tensor_parallel.sharding import Shard
from outrider.engine.tensor_parallel.symmetric_sums import SymmetricSums, find_symmetric_sums

TIMEOUT_S = 15.0  # for another rank to arrive at the same operation
RENDEZVOUS = timedelta(minutes=2)  # for all ranks to connect
GATHER = timedelta(hours=1)  # for all ranks to have loaded
POLL_S = 2e-5  # between two looks at a device
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"  # variables that name the interface for their sockets
FRAME = 8192  # bytes of a message's first frame; few messages have a second one

_LENGTH = 8  # bytes of the length, at the beginning of a message
_SIOCGIFADDR = 0x8915  # request for an interface's address (Linux)
_NAME = 256  # bytes of a machine's name
_TAG = 0  # messages between two ranks arrive in the order in which they were sent


class TorchRanks:
    """A `TensorGroup` over the default process group of torch.distributed."""

    def __init__(
        self, rank: int, of: int, rendezvous: str, *, host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S
    ) -> None:
        """Connect to the other ranks at `rendezvous`, "tcp://HOST:PORT" on rank 0's host. Wait for all of them.

        `host`: the address at which the other ranks reach this one.

        Raises RankLost when not all ranks connect.
        """
        self.shard = Shard(rank, of)
        self._others = [other for other in range(of) if other != rank]
        self._timeout = timedelta(seconds=timeout_s)
        choose_interface(host)
        with self._raising_rank_lost():
            store = _store(rank, of, rendezvous)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=of, timeout=RENDEZVOUS)
        assert dist.group.WORLD is not None
        self._ranks = dist.group.WORLD

    def all_reduce(self, part: Tensor) -> Tensor:
        first, *rest = self._exchange(part)
        total = first.float() + rest[0] if rest else first.float()
        for other in rest[1:]:
            total.add_(other)
        return total

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._exchange(part), -1)

    def gather(self, part: Tensor) -> Tensor | None:
        with self._raising_rank_lost():
            if self.shard.rank:
                self._wait([self._ranks.send([part.contiguous()], 0, _TAG)])
                return None
            parts = [part, *(torch.empty_like(part) for _ in self._others)]
            self._wait(self._start_receiving(parts))
            return torch.cat(parts, -1)

    def agree(self, own: bool) -> bool:
        """Return whether `own` is true on every rank."""
        return all(bool(it) for it in self._exchange(torch.tensor([own])))

    def names(self, own: str) -> list[str]:
        """Return the names of all ranks' machines."""
        name = torch.zeros(_NAME, dtype=torch.uint8)
        encoded = own.encode()[:_NAME]
        name[: len(encoded)] = torch.tensor([*encoded], dtype=torch.uint8)
        return [bytes(it.tolist()).rstrip(b"\0").decode(errors="replace") for it in self._exchange(name)]

    def finish(self) -> None:
        """Return at once: operations on CPUs are finished when they return."""

    def send(self, message: NDArray[np.uint8]) -> None:
        frame = np.zeros(max(FRAME, _LENGTH + len(message)), np.uint8)
        frame[:_LENGTH].view(np.int64)[0] = len(message)
        frame[_LENGTH : _LENGTH + len(message)] = message
        content = torch.from_numpy(frame)
        frames = [content[:FRAME]] if len(content) == FRAME else [content[:FRAME], content[FRAME:]]
        with self._raising_rank_lost():
            self._wait([work for frame in frames for work in self._start_sending(frame)])

    def receive(self) -> NDArray[np.uint8]:
        with self._raising_rank_lost():
            first = self._receive(FRAME)
            length = int(first[:_LENGTH].view(np.int64)[0])
            message = first[_LENGTH : _LENGTH + length]
            missing = length - len(message)
            return np.concatenate([message, self._receive(missing)]) if missing else message

    def heartbeat(self) -> None:
        self._exchange(torch.zeros(1))

    def barrier(self) -> None:
        self._exchange(torch.zeros(1), GATHER)

    def close(self) -> None:
        dist.destroy_process_group()

    def _receive(self, size: int) -> NDArray[np.uint8]:
        """Wait for a frame from rank 0."""
        frame = torch.empty(size, dtype=torch.uint8)
        self._wait([self._ranks.recv([frame], 0, _TAG)])
        return frame.numpy()

    def _exchange(self, part: Tensor, timeout: timedelta | None = None) -> list[Tensor]:
        """Return the parts of all ranks, in the order of ranks."""
        part = part.contiguous()
        parts = [part if rank == self.shard.rank else torch.empty_like(part) for rank in range(self.shard.of)]
        with self._raising_rank_lost():
            self._wait([*self._start_sending(part), *self._start_receiving(parts)], timeout)
        return parts

    def _start_sending(self, part: Tensor) -> list[dist.Work]:
        """Begin to send this rank's part to all others."""
        return [self._ranks.send([part], other, _TAG) for other in self._others]

    def _start_receiving(self, parts: Sequence[Tensor]) -> list[dist.Work]:
        """Begin to receive the parts of all others into `parts`."""
        return [self._ranks.recv([parts[other]], other, _TAG) for other in self._others]

    def _wait(self, works: Sequence[dist.Work], timeout: timedelta | None = None) -> None:
        for work in works:
            work.wait(timeout or self._timeout)

    @contextmanager
    def _raising_rank_lost(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:  # what torch.distributed and sockets raise for lost ranks
            raise RankLost(
                f"rank {self.shard.rank} of {self.shard.of} has lost another one: {str(error).splitlines()[0]}"
            ) from error


class CudaRanks(TorchRanks):
    """A group of ranks with one GPU each. Tensors on it go over NCCL, in stream order, without a wait on the host.

    So a recorded pass includes its sums. Small sums are one kernel where the GPUs read one another's memory
    (`symmetric_sums`). Messages and signs of life still go over gloo.
    """

    def __init__(
        self,
        rank: int,
        of: int,
        rendezvous: str,
        *,
        device: torch.device,
        host: str = "127.0.0.1",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """See `TorchRanks`. `device`: the GPU of this rank."""
        super().__init__(rank, of, rendezvous, host=host, timeout_s=timeout_s)
        torch.cuda.set_device(device)
        with self._raising_rank_lost():
            self._nccl = dist.new_group(backend="nccl", timeout=self._timeout)
        self._symmetric: SymmetricSums | None = None
        with self._raising_rank_lost():
            self._symmetric = find_symmetric_sums(self, partial(_symmetric, self._nccl, device), rank, device)

    def all_reduce(self, part: Tensor) -> Tensor:
        if part.device.type == "cpu":
            return super().all_reduce(part)
        if self._symmetric is not None and self._symmetric.fits(part):
            return self._symmetric.all_reduce(part)
        total = part.to(torch.float32, copy=True)
        with self._raising_rank_lost():
            dist.all_reduce(total, group=self._nccl)
        return total

    def all_gather(self, part: Tensor) -> Tensor:
        if part.device.type == "cpu":
            return super().all_gather(part)
        parts = part.new_empty((self.shard.of, *part.shape))
        with self._raising_rank_lost():
            dist.all_gather_into_tensor(parts, part.contiguous(), group=self._nccl)
        return parts.movedim(0, -2).flatten(-2)

    def gather(self, part: Tensor) -> Tensor | None:
        if part.device.type == "cpu":
            return super().gather(part)
        gathered = self.all_gather(part)
        return None if self.shard.rank else gathered

    def finish(self) -> None:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        with self._raising_rank_lost():
            wait_for(done.query, self._timeout.total_seconds())


def _symmetric(group: Any, device: torch.device) -> SymmetricSums:
    """Return sums over symmetric memory. Raises RuntimeError and ImportError where there are none."""
    import torch.distributed._symmetric_memory as symmetric  # not in all builds

    return SymmetricSums(symmetric, group.group_name, device)


def wait_for(done: Callable[[], bool], timeout_s: float) -> None:
    """Wait for a device. Raises TimeoutError.

    A replay's sums over NCCL have no time limit of their own: torch's watchdog sees only operations that were launched
    one by one.
    """
    until = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > until:
            raise TimeoutError(f"the device has not finished a pass for {timeout_s:g} s")
        time.sleep(POLL_S)


def _store(rank: int, of: int, rendezvous: str) -> Any:
    """Return the store in which ranks find each other; rank 0 serves it, at the address of the rendezvous alone.

    By itself torch.distributed listens on all interfaces, for whoever reaches them (CVE-2025-47277), so that rank 0
    gives it a socket. Raises OSError when the address cannot be bound.
    """
    address = urlsplit(rendezvous)
    host, port = address.hostname or "", address.port or 0
    listening = None if rank else socket.create_server((host, port), backlog=of).detach()  # the store closes it
    make = dist.TCPStore  # type: ignore[attr-defined]  # the stubs lack it
    return make(host, port, of, not rank, RENDEZVOUS, master_listen_fd=listening)


def choose_interface(host: str) -> None:
    """Have gloo and NCCL use the network interface with this address alone, unless the environment names others.

    Raises RankLost where no interface is known to have it: by themselves they would listen at another address.
    """
    if os.environ.get(GLOO) and os.environ.get(NCCL):
        return
    name = _interface(host)
    if name is None:
        raise RankLost(f"no network interface here is known to have the address {host}; set {GLOO} and {NCCL} to one")
    for variable, value in ((GLOO, name), (NCCL, f"={name}")):  # NCCL takes a name without = for a prefix
        if not os.environ.get(variable):
            os.environ[variable] = value


def _interface(host: str) -> str | None:
    """Return the name of the network interface with this IPv4 address; None where it cannot be found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an address, or a system with other requests than Linux
                if socket.inet_ntoa(ioctl(query, _SIOCGIFADDR, request)[20:24]) == host:
                    return name
    return None
