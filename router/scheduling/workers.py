"""The workers as this router sees them: what they announced, which sessions it placed there since, and the channels to
them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import get_args

from outrider.core.session.prefix_keys import prefix_keys, shared_length, unpack_keys
from outrider.core.session.protocol import SPOKEN, Origin
from outrider.core.session.speculation_status import SpeculationReason, SpeculationStatus, nearest
from outrider.errors import Moved, OutriderError, Overloaded, TokenizerMismatch, Unavailable
from outrider.limits.rate_limits import ResidencyEma
from outrider.rpc.tls import Tls
from outrider.store.compatibility import incompatibility, incompatible_drafters
from outrider.store.registry import Registry, Role, Worker
from router.requests.served_models import ServedModel
from router.scheduling.gate import Gate
from router.scheduling.placement import VerifierCandidate, in_other_zone, order_candidates
from router.scheduling.worker_channels import WorkerChannels

_SUSPECTED_S = 5.0  # how long a worker that failed is the last choice
LISTING_MAX_AGE_S = 0.25  # a list of drafters may be this old: sessions ask for it all the time
_ROOM_RETRY_S = 0.25  # a verifier that refused for lack of room gets one more try each time this has passed

log = logging.getLogger(__name__)


class WorkerPool:
    """The workers that sessions are placed on, and their load. Announcements are a heartbeat old, so sessions placed
    since then count too.

    Everything known of a worker is kept by its id: a process that starts at the address of a dead one is another
    worker, which has not failed and can be reached at once.

    Draining workers are not listed. Methods that read the registry raise Unavailable when Redis cannot be reached.
    """

    def __init__(self, registry: Registry, zone: str = "", tls: Tls | None = None, gate: Gate | None = None) -> None:
        self._registry = registry
        self._zone = zone
        self._listed: list[Worker] = []  # as last read
        self._foreign: list[Worker] = []  # announced at that read, under another protocol
        self._seen_at = float("-inf")  # monotonic time of that read
        self._registry_error: OutriderError | None = None  # why the last read failed
        self._refresh_lock = asyncio.Lock()
        self._listing_changed = asyncio.Event()  # set, and replaced, when workers were added to the list or left it
        self.gate = Gate() if gate is None else gate
        self.channels = WorkerChannels(tls, self.gate)
        self._placed: Counter[str] = Counter()  # sessions of this router, by worker id
        self._suspects: dict[str, float] = {}  # worker id -> end of the suspicion
        self._refusals: dict[str, tuple[int, float]] = {}  # worker id -> sessions of ours at its refusal, and when
        self._draining_ids: set[str] = set()  # ids of workers that answered Moved
        self._residency: dict[str, ResidencyEma] = {}  # worker id -> how long sessions of ours stay there
        self._logged_incompatible: set[tuple[str, str]] = set()  # ids of a drafter and a verifier

    async def verifiers(self, model: str) -> list[Worker]:
        """Return the verifiers of a model, best choice first."""
        await self._refresh_listing(time.monotonic())
        return [worker for worker in self._available("verifier") if worker.model == model]

    async def serving(self, model: str) -> list[Worker]:
        """Return the verifiers of a model, best choice first. Raises Unavailable where there are none."""
        verifiers = await self.verifiers(model)
        if not verifiers:
            foreign = [it for it in self._foreign if it.role == "verifier" and it.model == model]
            if foreign:
                raise Unavailable(f"model {model!r}: verifier {foreign[0].address} {protocols(foreign[0])}")
            raise Unavailable(f"no verifier serves model {model!r} right now; start one, or try again")
        return verifiers

    async def drafters(
        self, digest: bytes, verifier: Worker | None = None, *, sampled: bool = False, tenant: str | None = None
    ) -> list[Worker]:
        """Return the drafters of a tokenizer. With a verifier: those that can draft for it, best choice first, near
        ones before others; `sampled`: under rules that draw from q; `tenant`: for its texts."""
        await self._refresh_listing(time.monotonic() - LISTING_MAX_AGE_S)
        drafters = [worker for worker in self._available("drafter") if worker.tokenizer_digest == digest]
        if verifier is None:
            return drafters
        drafters = await self.gate.readers(drafters, verifier.model, tenant)
        fitting = [drafter for drafter in drafters if self._fits(drafter, verifier, sampled)]
        return sorted(fitting, key=lambda worker: (self.suspected(worker), in_other_zone(worker.zone, verifier.zone)))

    def why_no_drafter(self, verifier: Worker, *, sampled: bool = False) -> SpeculationStatus:
        """Return why none of the listed drafters can draft for a verifier; of several reasons the one of the drafter
        that comes nearest."""
        found = [incompatibility(drafter, verifier, sampled=sampled) for drafter in self._available("drafter")]
        return nearest(status for status in found if status is not None)

    def misfits(self, model: str) -> list[tuple[Worker, str]]:
        """Return the workers that are of no use to a model, each with the reason: verifiers of it and drafters that
        speak another protocol, and drafters that can draft for none of its verifiers."""
        foreign = [(it, protocols(it)) for it in self._foreign if it.role == "drafter" or it.model == model]
        found = incompatible_drafters(self._listed, self._verifiers_of(model))
        return foreign + [(worker, status.explanation) for worker, status in found]

    def drafter_models(self, tokenizer_digest: bytes) -> list[str]:
        """Return the models of the listed drafters of a tokenizer."""
        listed = (worker for worker in self._listed if worker.role == "drafter")
        return sorted({worker.model for worker in listed if worker.tokenizer_digest == tokenizer_digest})

    def is_listed(self, worker_id: str) -> bool:
        """Return whether a worker is listed and has not failed lately."""
        return any(worker.worker_id == worker_id and not self.suspected(worker) for worker in self._listed)

    def serves(self, model: str) -> bool:
        """Return whether a verifier of a model was listed at the last read."""
        return bool(self._verifiers_of(model))

    @property
    def listed(self) -> tuple[Worker, ...]:
        """The workers that were there at the last read."""
        return tuple(self._listed)

    def counts(self) -> dict[str, int]:
        """Return the number of listed workers by role. A role without workers has a 0, which must be shown, too."""
        listed = [worker.role for worker in self._listed]
        return {role: listed.count(role) for role in get_args(Role)}

    async def listing_change(self, within_s: float) -> None:
        """Wait until a worker is added to the list or leaves it, at most `within_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._listing_changed.wait()

    async def refresh(self) -> None:
        """Read the registry. If the certificate was renewed, later calls use the new one."""
        self.channels.renew()
        await self._refresh_listing(time.monotonic())

    def capacity(self, model: str) -> int | None:
        """Return how many sessions of ours a model's verifiers can hold, as far as is known; None: no verifier serves
        the model.

        Several routers share a verifier and do not know of each other's sessions, so a refusal shows how many it has
        room for; from then on one more is tried every quarter of a second.
        """
        serving = self._verifiers_of(model)
        return sum(map(self._room, serving)) if serving else None

    def longest_context(self, model: str) -> int:
        """Return the longest context of a model's listed verifiers; 0 if none is listed."""
        return max((worker.context for worker in self._verifiers_of(model)), default=0)

    def _verifiers_of(self, model: str) -> list[Worker]:
        return [worker for worker in self._listed if worker.role == "verifier" and worker.model == model]

    def rank_verifiers(self, workers: Sequence[Worker], holder: str, tokens: Sequence[int], scope: str) -> list[Worker]:
        """Return verifiers in the order in which a session over these tokens is to try them; `holder` has its KV.

        `scope`: KV is shared only among sessions with the same value; `Contract.kv_scope` returns it.
        """
        keys = prefix_keys(tokens, scope) if len(workers) > 1 else []
        return order_candidates([self._candidate(worker, holder, keys) for worker in workers], len(tokens))

    def add_session(self, worker: Worker) -> None:
        """Count a session in, until `remove_session`. The worker's channel stays open that long."""
        self._placed[worker.worker_id] += 1

    def remove_session(self, worker: Worker, stayed_s: float = 0.0) -> None:
        """Count a session out, which was served for `stayed_s` seconds."""
        self._placed[worker.worker_id] -= 1
        if stayed_s:
            self._residency.setdefault(worker.worker_id, ResidencyEma()).observe(stayed_s)

    def _fits(self, drafter: Worker, verifier: Worker, sampled: bool) -> bool:
        """Return whether a drafter can draft for a verifier. A permanent mismatch is logged once."""
        status, pair = incompatibility(drafter, verifier, sampled=sampled), (drafter.worker_id, verifier.worker_id)
        if status is not None and status.reason is not SpeculationReason.RULE and pair not in self._logged_incompatible:
            self._logged_incompatible.add(pair)
            log.warning("drafter %s is not used: %s", drafter.address, status.explanation)
        return status is None

    def suspected(self, worker: Worker) -> bool:
        """Return whether a worker failed lately."""
        return self._suspects.get(worker.worker_id, 0.0) > time.monotonic()

    def suspect(self, worker: Worker) -> None:
        """Make a worker that failed the last choice for a while."""
        self._suspects[worker.worker_id] = time.monotonic() + _SUSPECTED_S

    def on_failure(self, worker: Worker, error: Exception) -> None:
        """Take a worker's error in answer to the placement of a session that is counted in."""
        match error:
            case Moved():
                self._draining_ids.add(worker.worker_id)
            case Overloaded() if worker.role == "verifier":
                self._refusals[worker.worker_id] = (self._placed[worker.worker_id] - 1, time.monotonic())
            case _:
                self.suspect(worker)

    def _available(self, role: Role) -> list[Worker]:
        """Return the workers of a role, the least loaded first."""
        listed = (it for it in self._listed if it.role == role and it.worker_id not in self._draining_ids)
        return sorted(listed, key=self._load_key)

    async def _refresh_listing(self, since: float) -> None:
        """Read the registry unless that was done since `since`. Raises Unavailable if the last read failed."""
        async with self._refresh_lock:
            if self._seen_at < since:
                began = time.monotonic()
                try:
                    reached = [worker for worker in await self._registry.workers() if not worker.gate]
                    workers = self._alive(self._speaking(reached)) + [it.worker for it in self.gate.values()]
                except OutriderError as error:
                    self._registry_error = error
                else:
                    self._registry_error = None
                    before = {it.worker_id for it in self._listed}
                    self._listed = [it for it in workers if not it.draining and it.worker_id not in self._draining_ids]
                    if before != {it.worker_id for it in self._listed}:
                        self._listing_changed.set()
                        self._listing_changed = asyncio.Event()
                    await self._forget(workers)
                self._seen_at = began
            if self._registry_error is not None:
                raise Unavailable(str(self._registry_error))

    def _speaking(self, announced: Sequence[Worker]) -> list[Worker]:
        """Return the workers whose protocol this router speaks. Each other one is logged once."""
        known = {worker.worker_id for worker in self._foreign}
        self._foreign = [worker for worker in announced if worker.protocol not in SPOKEN]
        for worker in self._foreign:
            if worker.worker_id not in known:
                log.warning("%s %s is not used: it %s", worker.role, worker.address, protocols(worker))
        return [worker for worker in announced if worker.protocol in SPOKEN]

    def _alive(self, announced: Sequence[Worker]) -> list[Worker]:
        """Return the announced workers, and verifiers that are not announced any more but serve sessions of ours: these
        have lost Redis."""
        addresses = {worker.address for worker in announced}
        lost = (worker for worker in self._listed if worker.role == "verifier" and worker.address not in addresses)
        return [*announced, *(it for it in lost if self._placed[it.worker_id] > 0 and not self.suspected(it))]

    def _load_key(self, worker: Worker) -> tuple[bool, float]:
        return self.suspected(worker), self._load(worker)

    def sessions(self, worker: Worker) -> int:
        """Return how many sessions a worker has, as far as is known."""
        return max(worker.sessions, self._placed[worker.worker_id])

    def _load(self, worker: Worker) -> float:
        """Return the worker's sessions per slot."""
        return self.sessions(worker) / max(1, worker.slots)

    def _room(self, worker: Worker) -> int:
        """Return how many sessions of ours a verifier can hold."""
        held, refused_at = self._refusals.get(worker.worker_id, (worker.slots, 0.0))
        return min(worker.slots, held + int((time.monotonic() - refused_at) / _ROOM_RETRY_S))

    def _candidate(self, worker: Worker, holder: str, keys: Sequence[int]) -> VerifierCandidate:
        full = self._placed[worker.worker_id] >= self._room(worker)
        residency = self._residency.get(worker.worker_id)
        return VerifierCandidate(
            worker,
            suspected=self.suspected(worker),
            holds=worker.worker_id == holder,
            load=self._load(worker),
            wait_s=((residency and residency.wait_s(0, worker.slots)) or 0.0) if full else 0.0,
            full=full,
            near=not in_other_zone(worker.zone, self._zone),
            shared=shared_length(keys, unpack_keys(worker.prefixes)),
        )

    async def _forget(self, workers: Sequence[Worker]) -> None:
        """Drop what is kept for workers that are gone."""
        now = time.monotonic()
        ids = {worker.worker_id for worker in workers}
        self._suspects = {name: until for name, until in self._suspects.items() if until > now}
        self._refusals = {name: value for name, value in self._refusals.items() if name in ids}
        self._residency = {name: residency for name, residency in self._residency.items() if name in ids}
        self._draining_ids &= ids
        self._logged_incompatible = {pair for pair in self._logged_incompatible if ids.issuperset(pair)}
        self._placed = +self._placed
        await self.channels.keep(ids | self._placed.keys())


async def matching_verifiers(worker_pool: WorkerPool, model: ServedModel, origin: Origin | None = None) -> list[Worker]:
    """Return the verifiers that serve a model with the router's tokenizer, best choice first; with an `origin` those
    that may go on with a text of it.

    Raises Unavailable when no verifier serves the model or none may go on, TokenizerMismatch when all of them have
    another tokenizer.
    """
    verifiers = await worker_pool.serving(model.name)
    matching = [worker for worker in verifiers if worker.tokenizer_digest == model.digest]
    if not matching:
        raise TokenizerMismatch(
            f"the router's tokenizer for model {model.name!r} is not its verifiers' own; "
            "give the router the tokenizer.json of their checkpoint"
        )
    if origin is not None:
        equal = [worker for worker in matching if worker.origin == origin]
        if not equal:
            there = "; ".join(sorted({f"{worker.origin}" for worker in matching}))
            raise Unavailable(
                f"the generation began under {origin}, and the verifiers of model {model.name!r} have {there}, so its "
                "text might change; start a verifier that has the same, or generate anew"
            )
        return equal
    return matching


def protocols(worker: Worker) -> str:
    """Return why a worker of another protocol is not used, for people."""
    spoken = " or ".join(map(str, sorted(SPOKEN)))
    return f"speaks protocol {worker.protocol or 'unknown'}, and this router {spoken}; finish the upgrade of both"
