"""The workers as this router sees them: what they announced, what it placed there since, how to reach them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import get_args

import grpc.aio

from outrider.core.prefixes import prefix_keys, shared, unpacked
from outrider.core.speculation import SpeculationReason, SpeculationStatus, nearest
from outrider.errors import Moved, OutriderError, Overloaded, Unavailable
from outrider.rpc.channels import open_channel
from outrider.rpc.tls import NAMES, Tls
from outrider.store.fitting import misfit, misfits
from outrider.store.registry import Registry, Role, Worker
from router.placement import Prospect, apart, preferred
from router.rates import Stay

_LONGEST_CALL_S = 3600.0  # that a channel is kept for its calls after certificates were renewed
_SUSPECTED_S = 5.0  # a worker that failed is the last choice for so long
FRESH_S = 0.25  # for drafters, which sessions look for all the time, the registry is not asked more often
_RETRY_S = 0.25  # after a verifier refused us for want of room, one more is tried there each time that this has passed

log = logging.getLogger(__name__)


class Fleet:
    """Placement by load. Announcements are a heartbeat old, so what was placed since then counts too.

    All that is kept of a worker is kept by its id: a process that starts anew at the address of one that died is
    another worker, which has failed nobody and is reached at once.

    Workers that are going down are not listed. Methods that look at the registry raise Unavailable when Redis cannot be
    reached.
    """

    def __init__(self, registry: Registry, zone: str = "", tls: Tls | None = None) -> None:
        self._registry = registry
        self._zone = zone
        self._tls = tls
        self._listed: list[Worker] = []  # as last seen
        self._seen_at = float("-inf")  # monotonic; when that was asked for
        self._unseen: OutriderError | None = None  # why it was not told
        self._looking = asyncio.Lock()
        self._channels: dict[str, grpc.aio.Channel] = {}  # by worker id: an older one's would still be pausing
        self._retired: set[asyncio.Task[None]] = set()  # close channels once their calls have ended
        self._placed: Counter[str] = Counter()  # sessions of this router, by worker id
        self._suspects: dict[str, float] = {}  # worker id -> until when
        self._refusals: dict[str, tuple[int, float]] = {}  # worker id -> sessions of ours that it held, and when
        self._gone: set[str] = set()  # ids of workers that said that they are going down
        self._stays: dict[str, Stay] = {}  # worker id -> how long sessions of ours stay there
        self._misfits: set[tuple[str, str]] = set()  # ids of drafters and of verifiers that they cannot draft for

    async def verifiers(self, model: str) -> list[Worker]:
        """Verifiers of a model, best choice first."""
        await self._look(time.monotonic())
        return [worker for worker in self._there("verifier") if worker.model == model]

    async def drafters(
        self, tokenizer_digest: bytes, verifier: Worker | None = None, *, sampled: bool = False
    ) -> list[Worker]:
        """Drafters of a tokenizer; with a verifier those that can draft for it, best choice first, which is near it.

        `sampled`: those alone that can draft for rules that draw from q.
        """
        await self._look(time.monotonic() - FRESH_S)
        drafters = [worker for worker in self._there("drafter") if worker.tokenizer_digest == tokenizer_digest]
        if verifier is None:
            return drafters
        fitting = [drafter for drafter in drafters if self._fits(drafter, verifier, sampled)]
        return sorted(fitting, key=lambda worker: (self.suspected(worker), apart(worker.zone, verifier.zone)))

    def without_drafter(self, verifier: Worker, *, sampled: bool = False) -> SpeculationStatus:
        """Why none of the drafters that were there when last seen can draft for a verifier; of several reasons the one
        of the drafter that is nearest to it."""
        found = [misfit(drafter, verifier, sampled=sampled) for drafter in self._there("drafter")]
        return nearest(status for status in found if status is not None)

    def misfits(self, model: str) -> list[tuple[Worker, SpeculationStatus]]:
        """Drafters that can draft for none of a model's verifiers, each with the reason, as last seen."""
        verifiers = [worker for worker in self._listed if worker.role == "verifier" and worker.model == model]
        return misfits(self._listed, verifiers)

    def drafting(self, tokenizer_digest: bytes) -> list[str]:
        """The models of the drafters of a tokenizer that were there when last seen."""
        listed = (worker for worker in self._listed if worker.role == "drafter")
        return sorted({worker.model for worker in listed if worker.tokenizer_digest == tokenizer_digest})

    def lists(self, worker_id: str) -> bool:
        """Whether a worker was there when last seen, and has not failed lately."""
        return any(worker.worker_id == worker_id and not self.suspected(worker) for worker in self._listed)

    @property
    def listed(self) -> tuple[Worker, ...]:
        """Workers that were there when last seen."""
        return tuple(self._listed)

    def counts(self) -> dict[str, int]:
        """Workers that were there when last seen, by role: 0 where there are none, which must be seen, too."""
        listed = [worker.role for worker in self._listed]
        return {role: listed.count(role) for role in get_args(Role)}

    async def refresh(self) -> None:
        """Looks at the registry, and whether our certificate was renewed: calls from then on show the new one."""
        latest = self._tls and self._tls.renewed()
        if latest is not self._tls:
            self._tls = latest
            self._retire()
        await self._look(time.monotonic())

    def places(self, model: str) -> int | None:
        """Sessions of ours that a model's verifiers can hold, as far as is known; None: nobody serves it.

        Several routers share a verifier and do not know of each other, so a refusal tells for how many it has room;
        from then on one more is tried every quarter of a second.
        """
        serving = [worker for worker in self._listed if worker.role == "verifier" and worker.model == model]
        return sum(map(self._room, serving)) if serving else None

    def best_first(self, workers: Sequence[Worker], holder: str, tokens: Sequence[int], tenant: str) -> list[Worker]:
        """Verifiers in the order in which a tenant's session over these tokens is to try them; `holder` has its KV."""
        keys = prefix_keys(tokens, tenant) if len(workers) > 1 else []
        return preferred([self._prospect(worker, holder, keys) for worker in workers], len(tokens))

    def take(self, worker: Worker) -> None:
        """Counts a session in, until `release`. The worker's channel stays open for so long."""
        self._placed[worker.worker_id] += 1

    def channel(self, worker: Worker) -> grpc.aio.Channel:
        """The one channel to a worker."""
        if worker.worker_id not in self._channels:
            self._channels[worker.worker_id] = open_channel(worker.address, self._tls, NAMES[worker.role][0])
        return self._channels[worker.worker_id]

    def release(self, worker: Worker, stayed_s: float = 0.0) -> None:
        """Counts a session out; it was served for so long."""
        self._placed[worker.worker_id] -= 1
        if stayed_s:
            self._stays.setdefault(worker.worker_id, Stay()).observe(stayed_s)

    def _fits(self, drafter: Worker, verifier: Worker, sampled: bool) -> bool:
        """Whether a drafter can draft for a verifier. One that never can is logged once."""
        status, pair = misfit(drafter, verifier, sampled=sampled), (drafter.worker_id, verifier.worker_id)
        if status is not None and status.reason is not SpeculationReason.RULE and pair not in self._misfits:
            self._misfits.add(pair)
            log.warning("drafter %s is not used: %s", drafter.address, status.explanation)
        return status is None

    def suspected(self, worker: Worker) -> bool:
        """Whether a worker failed lately."""
        return self._suspects.get(worker.worker_id, 0.0) > time.monotonic()

    def suspect(self, worker: Worker) -> None:
        """Makes a worker that failed the last choice for a while."""
        self._suspects[worker.worker_id] = time.monotonic() + _SUSPECTED_S

    def failed(self, worker: Worker, error: Exception) -> None:
        """Learns from what a worker answered where a session was to be placed, one that is counted in."""
        match error:
            case Moved():
                self._gone.add(worker.worker_id)
            case Overloaded() if worker.role == "verifier":
                self._refusals[worker.worker_id] = (self._placed[worker.worker_id] - 1, time.monotonic())
            case _:
                self.suspect(worker)

    async def close(self) -> None:
        """Closes all channels."""
        for retired in self._retired:
            retired.cancel()
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close(None)

    def _retire(self) -> None:
        """Has the channels take no further calls; those that run go on."""
        while self._channels:
            _, channel = self._channels.popitem()
            task = asyncio.create_task(channel.close(_LONGEST_CALL_S))
            self._retired.add(task)
            task.add_done_callback(self._retired.discard)

    def _there(self, role: Role) -> list[Worker]:
        """Workers of a role, the least burdened first."""
        listed = (it for it in self._listed if it.role == role and it.worker_id not in self._gone)
        return sorted(listed, key=self._burden)

    async def _look(self, since: float) -> None:
        """Looks at the registry unless somebody has since then. Raises Unavailable where it was not to be seen."""
        async with self._looking:
            if self._seen_at < since:
                began = time.monotonic()
                try:
                    everyone = self._alive(await self._registry.workers())
                except OutriderError as error:
                    self._unseen = error
                else:
                    self._unseen = None
                    self._listed = [it for it in everyone if not it.draining and it.worker_id not in self._gone]
                    await self._forget(everyone)
                self._seen_at = began
            if self._unseen is not None:
                raise Unavailable(str(self._unseen))

    def _alive(self, announced: Sequence[Worker]) -> list[Worker]:
        """Who is announced; and verifiers that are not any more, yet serve sessions of ours: they have lost Redis."""
        addresses = {worker.address for worker in announced}
        lost = (worker for worker in self._listed if worker.role == "verifier" and worker.address not in addresses)
        return [*announced, *(it for it in lost if self._placed[it.worker_id] > 0 and not self.suspected(it))]

    def _burden(self, worker: Worker) -> tuple[bool, float]:
        return self.suspected(worker), self._load(worker)

    def sessions(self, worker: Worker) -> int:
        """How many a worker has, as far as is known."""
        return max(worker.sessions, self._placed[worker.worker_id])

    def _load(self, worker: Worker) -> float:
        """Sessions there for each slot."""
        return self.sessions(worker) / max(1, worker.slots)

    def _room(self, worker: Worker) -> int:
        """Sessions of ours that a verifier can hold."""
        held, refused_at = self._refusals.get(worker.worker_id, (worker.slots, 0.0))
        return min(worker.slots, held + int((time.monotonic() - refused_at) / _RETRY_S))

    def _prospect(self, worker: Worker, holder: str, keys: Sequence[int]) -> Prospect:
        full = self._placed[worker.worker_id] >= self._room(worker)
        stay = self._stays.get(worker.worker_id)
        return Prospect(
            worker,
            suspected=self.suspected(worker),
            holds=worker.worker_id == holder,
            load=self._load(worker),
            wait_s=((stay and stay.wait_s(0, worker.slots)) or 0.0) if full else 0.0,
            full=full,
            near=not apart(worker.zone, self._zone),
            shared=shared(keys, unpacked(worker.prefixes)),
        )

    async def _forget(self, everyone: Sequence[Worker]) -> None:
        """Drops what is kept for workers that are gone."""
        now = time.monotonic()
        ids = {worker.worker_id for worker in everyone}
        self._suspects = {name: until for name, until in self._suspects.items() if until > now}
        self._refusals = {name: value for name, value in self._refusals.items() if name in ids}
        self._stays = {name: stay for name, stay in self._stays.items() if name in ids}
        self._gone &= ids
        self._misfits = {pair for pair in self._misfits if ids.issuperset(pair)}
        self._placed = +self._placed
        unused = self._channels.keys() - ids - self._placed.keys()
        for channel in [self._channels.pop(name) for name in unused]:
            await channel.close(None)
