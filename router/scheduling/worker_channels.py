"""The channels to workers, by their ids: that of a dead process at an address would be in its backoff; and the calls of
drafters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set
from typing import Any, Protocol

import grpc.aio

from outrider.errors import Unavailable
from outrider.rpc.channels import open_channel
from outrider.rpc.status import from_rpc_error
from outrider.rpc.tls import NAMES, Tls
from outrider.store.registry import Worker
from outrider.telemetry.tracing import trace_metadata
from outrider.wire import drafter as wire
from router.scheduling.gate import Gate

_RETIRED_S = 3600.0  # how long a channel is kept for running calls after certificates were renewed


class DrafterCalls(Protocol):
    """A drafter, however it is reached. Methods raise the OutriderErrors of the drafter and of the way to it."""

    async def attach(self, request: wire.AttachRequest, timeout_s: float) -> wire.AttachResponse:
        """Attach a session. Repeating it changes nothing."""

    async def detach(self, request: wire.DetachRequest, timeout_s: float) -> None:
        """Detach a session."""


class CalledDrafter:
    """A drafter at an address."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = wire.DrafterStub(channel)

    async def attach(self, request: wire.AttachRequest, timeout_s: float) -> wire.AttachResponse:
        """See `DrafterCalls`."""
        answer: wire.AttachResponse = await self._call(self._stub.Attach, request, timeout_s)
        return answer

    async def detach(self, request: wire.DetachRequest, timeout_s: float) -> None:
        """See `DrafterCalls`."""
        await self._call(self._stub.Detach, request, timeout_s)

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return await method(request, timeout=timeout_s, metadata=trace_metadata())
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


class WorkerChannels(dict[str, grpc.aio.Channel]):
    """One channel to each worker."""

    def __init__(self, tls: Tls | None, gate: Gate) -> None:
        super().__init__()
        self._tls = tls
        self._gate = gate
        self._retired: set[asyncio.Task[None]] = set()  # tasks that close channels once their calls have ended

    def to(self, worker: Worker) -> grpc.aio.Channel:
        """Return the one channel to a worker."""
        if worker.worker_id not in self:
            self[worker.worker_id] = open_channel(worker.address, self._tls, NAMES[worker.role][0])
        return self[worker.worker_id]

    def drafter(self, worker: Worker) -> DrafterCalls:
        """Return a drafter to call, at its address or at the gate. Raises Unavailable for one that has left that."""
        if not worker.gate:
            return CalledDrafter(self.to(worker))
        if worker.worker_id not in self._gate:
            raise Unavailable(f"drafter {worker.worker_id} has left the gate")
        return self._gate[worker.worker_id]

    def renew(self) -> None:
        """If the certificate was renewed, have later calls use the new one; running calls continue."""
        latest = self._tls and self._tls.renewed()
        if latest is not self._tls:
            self._tls = latest
            while self:
                task = asyncio.create_task(self.popitem()[1].close(_RETIRED_S))
                self._retired.add(task)
                task.add_done_callback(self._retired.discard)

    async def keep(self, worker_ids: Set[str]) -> None:
        """Close the channels to all other workers."""
        for channel in [self.pop(name) for name in self.keys() - worker_ids]:
            await channel.close(None)

    async def close(self) -> None:
        """Close all channels."""
        for retired in self._retired:
            retired.cancel()
        await self.keep(frozenset())
