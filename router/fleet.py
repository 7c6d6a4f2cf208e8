"""The workers as this router sees them: what they announced, what it placed there since, how to reach them."""

from __future__ import annotations

import time
from collections import Counter

import grpc.aio

from outrider.rpc.channels import open_channel
from outrider.rpc.tls import NAMES, Tls
from outrider.store.registry import Registry, Role, Worker

_SUSPECTED_S = 5.0  # a worker that failed is the last choice for so long


class Fleet:
    """Placement by load. Announcements are a heartbeat old, so what was placed since then counts too.

    Methods that look at the registry raise Unavailable when Redis cannot be reached.
    """

    def __init__(self, registry: Registry, tls: Tls | None = None) -> None:
        self._registry = registry
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._placed: Counter[str] = Counter()  # sessions of this router, by worker address
        self._suspects: dict[str, float] = {}  # worker address -> until when

    async def verifiers(self, model: str) -> list[Worker]:
        """Verifiers of a model, best choice first."""
        return [worker for worker in await self._workers("verifier") if worker.model == model]

    async def drafters(self, tokenizer_digest: bytes) -> list[Worker]:
        """Drafters of a tokenizer, best choice first."""
        return [worker for worker in await self._workers("drafter") if worker.tokenizer_digest == tokenizer_digest]

    def take(self, worker: Worker) -> None:
        """Counts a session in, until `release`. The worker's channel stays open for so long."""
        self._placed[worker.address] += 1

    def channel(self, worker: Worker) -> grpc.aio.Channel:
        """The one channel to a worker."""
        if worker.address not in self._channels:
            self._channels[worker.address] = open_channel(worker.address, self._tls, NAMES[worker.role][0])
        return self._channels[worker.address]

    def release(self, worker: Worker) -> None:
        """Counts a session out."""
        self._placed[worker.address] -= 1

    def suspected(self, worker: Worker) -> bool:
        """Whether a worker failed lately."""
        return self._suspects.get(worker.address, 0.0) > time.monotonic()

    def suspect(self, worker: Worker) -> None:
        """Makes a worker that failed the last choice for a while."""
        self._suspects[worker.address] = time.monotonic() + _SUSPECTED_S

    async def close(self) -> None:
        """Closes all channels."""
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close(None)

    async def _workers(self, role: Role) -> list[Worker]:
        workers = await self._registry.workers()
        await self._forget({worker.address for worker in workers})
        return sorted((worker for worker in workers if worker.role == role), key=self._burden)

    def _burden(self, worker: Worker) -> tuple[bool, float]:
        sessions = max(worker.sessions, self._placed[worker.address])
        return self.suspected(worker), sessions / max(1, worker.slots)

    async def _forget(self, listed: set[str]) -> None:
        """Drops what is kept for workers that are gone."""
        now = time.monotonic()
        self._suspects = {address: until for address, until in self._suspects.items() if until > now}
        self._placed = +self._placed
        unused = self._channels.keys() - listed - self._placed.keys()
        for channel in [self._channels.pop(address) for address in unused]:
            await channel.close(None)
