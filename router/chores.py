"""What a router does all the time: it looks who is there, and ends what was left behind."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Container

from outrider.errors import OutriderError
from outrider.store.sessions import Sessions
from router.admission import Admission
from router.fleet import Fleet

WATCH_S = 0.25  # between two looks at the registry
SWEEP_S = 10.0  # between two sweeps, more or less: routers do not do it together
HANDFUL, BREATH_S = 16, 0.05  # sessions looked at in a row, and the pause after them

log = logging.getLogger(__name__)


async def look_after(fleet: Fleet, admission: Admission) -> None:
    """Keeps what is known of the workers fresh, and gives the places that there are to who waits. Until cancelled."""
    while True:
        try:
            await fleet.refresh()
        except OutriderError as error:
            log.debug("%s", error)  # what was known before still holds
        admission.dispatch()
        await asyncio.sleep(WATCH_S)


async def sweep(sessions: Sessions) -> None:
    """Ends generations whose router died and that nobody resumed in time, whoever's they were. Until cancelled.

    Several routers may do it at once: whoever comes second finds nothing left to do.
    """
    seen: frozenset[str] = frozenset()
    while True:
        await asyncio.sleep(SWEEP_S * random.uniform(0.5, 1.5))
        try:
            seen = await sweep_once(sessions, seen)
        except OutriderError as error:
            log.debug("%s", error)  # the next sweep finds them, too


async def sweep_once(sessions: Sessions, before: Container[str]) -> frozenset[str]:
    """Looks at every generation that is due, a few at a time, and ends what is left behind and was so `before`; the
    others that are.

    Once is not enough: after an outage of Redis all look so, until their owners have got through to it again.
    Raises Unavailable while it is away.
    """
    await sessions.leases.remove_ended()
    if await sessions.leases.begin_scan():
        await _list_all(sessions)
    found = set[str]()
    for looked, lease in enumerate(await sessions.leases.due(), start=1):
        if lease.session_id not in before:
            if await sessions.left_behind(lease):
                found.add(lease.session_id)
        elif await sessions.abandon(lease):
            log.info("session %s: its generation was left behind and nobody resumed it in time", lease.session_id)
        if looked % HANDFUL == 0:
            await asyncio.sleep(BREATH_S)
    return frozenset(found)


async def _list_all(sessions: Sessions) -> None:
    """Enters what runs and the index of leases has not into it."""
    looked = 0
    async for session_id in sessions.ids():
        await sessions.list_lease(session_id)
        looked += 1
        if looked % HANDFUL == 0:
            await asyncio.sleep(BREATH_S)
    await sessions.leases.end_scan()
