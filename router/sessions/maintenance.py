"""A router's periodic tasks: refresh the list of workers, keep its ticket key listed, end abandoned generations."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Container

from outrider.errors import OutriderError
from outrider.store.redis.client import Client
from outrider.store.redis.redis_clock import RedisClock
from outrider.store.sessions import Sessions
from outrider.store.tenant_storage import TenantStorage
from outrider.store.tickets import RENEW_S, list_key
from router.scheduling.admission import Admission
from router.scheduling.workers import WorkerPool

REFRESH_S = 0.25  # between two reads of the registry
MEASURE_S = 2.0  # between two measurements of how full Redis is
SWEEP_S = 10.0  # between two sweeps; randomized, so that routers do not sweep together
SWEEP_BATCH, SWEEP_PAUSE_S = 16, 0.05  # sessions checked in a row, and the pause after them

log = logging.getLogger(__name__)


async def refresh_workers(worker_pool: WorkerPool, admission: Admission) -> None:
    """Refresh the list of workers, and grant free slots to waiting requests. Run until cancelled."""
    while True:
        try:
            await worker_pool.refresh()
        except OutriderError as error:
            log.debug("%s", error)  # the last list stays in use
        admission.dispatch()
        await asyncio.sleep(REFRESH_S)


async def keep_key_listed(redis: Client, public_key: bytes, clock: RedisClock) -> None:
    """Read Redis' clock and renew this router's ticket key in Redis. Run until cancelled.

    The key stays listed when the router ends, because tickets that it has signed are valid a while longer.
    """
    while True:
        await asyncio.sleep(RENEW_S)
        try:
            await clock.read(redis)
            await list_key(redis, public_key, clock.now())
        except OutriderError as error:
            log.debug("%s", error)  # upstreams keep the keys that they have read


async def keep_measured(storage: TenantStorage) -> None:
    """Measure how full Redis is, again and again. Run until cancelled."""
    failed = ""
    while True:
        try:
            await storage.measure()
            failed = ""
        except OutriderError as error:
            if str(error) != failed:
                log.warning("how full Redis is cannot be read, so tenants are not kept from filling it: %s", error)
            failed = str(error)
        await asyncio.sleep(MEASURE_S)


async def sweep(sessions: Sessions) -> None:
    """End generations of any router whose owner died and that were not resumed in time. Run until cancelled.

    Several routers may sweep at once: the second finds nothing left to do.
    """
    seen: frozenset[str] = frozenset()
    while True:
        await asyncio.sleep(SWEEP_S * random.uniform(0.5, 1.5))
        try:
            seen = await sweep_once(sessions, seen)
        except OutriderError as error:
            log.debug("%s", error)  # the next sweep finds them again


async def sweep_once(sessions: Sessions, before: Container[str]) -> frozenset[str]:
    """Check every generation whose lease is due, a few at a time. End those that are left behind and are in `before`;
    return the others that are left behind.

    One check is not enough: after an outage of Redis all generations look left behind until their owners have renewed
    their leases. Raises Unavailable while Redis is away.
    """
    await sessions.leases.remove_ended()
    if await sessions.leases.begin_scan():
        await _reindex_leases(sessions)
    found = set[str]()
    for checked, lease in enumerate(await sessions.leases.due(), start=1):
        if lease.session_id not in before:
            if await sessions.left_behind(lease):
                found.add(lease.session_id)
        elif await sessions.abandon(lease):
            log.info("session %s: its owner is gone and its generation was not resumed in time", lease.session_id)
        if checked % SWEEP_BATCH == 0:
            await asyncio.sleep(SWEEP_PAUSE_S)
    return frozenset(found)


async def _reindex_leases(sessions: Sessions) -> None:
    """Add running generations that are missing to the index of leases."""
    checked = 0
    async for session_id in sessions.ids():
        await sessions.list_lease(session_id)
        checked += 1
        if checked % SWEEP_BATCH == 0:
            await asyncio.sleep(SWEEP_PAUSE_S)
    await sessions.leases.end_scan()
