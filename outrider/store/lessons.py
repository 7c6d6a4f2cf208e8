"""What sessions taught about drafting, shared by all routers, so that a new one need not learn it anew.

Not fenced, and eventually consistent: where two routers share at the same moment, what one of them saw in a few seconds
is lost, and nothing hangs on it. Figures, never content.
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from outrider.core.acceptance import Counts
from outrider.core.goodput import Lessons
from outrider.store.client import Client, translated

MOST_STEPS = 5_000.0  # that are remembered; older ones fade
TTL_S = 30 * 24 * 3600

_KEY = "outrider:{lessons}:"

log = logging.getLogger(__name__)


async def share(redis: Client, name: str, lessons: Lessons) -> None:
    """Adds what was seen here since the last time to what is known under that name, and takes that.

    Raises Unavailable when Redis cannot be used; nothing is forgotten then.
    """
    seen, lessons.fresh = lessons.fresh, Counts()
    try:
        with translated(redis):
            counts, times = _load(name, await redis.get(_KEY + name))
            if counts.steps > MOST_STEPS:
                counts.fade(MOST_STEPS / counts.steps)
            counts.add(seen)
            times |= {what: average.mean for what, average in lessons.times().items() if average.known}
            if seen.steps:
                await redis.set(_KEY + name, json.dumps({"counts": counts.values(), "times": times}), ex=TTL_S)
    except BaseException:
        lessons.fresh.add(seen)
        raise
    counts.add(lessons.fresh)  # what came meanwhile
    lessons.counts.become(counts)
    for what, average in lessons.times().items():
        if not average.known and what in times:
            average.observe(times[what])


def _load(name: str, stored: bytes | str | None) -> tuple[Counts, dict[str, float]]:
    """What is stored; nothing, where that is not what is written here."""
    if stored is None:
        return Counts(), {}
    try:
        held: Any = json.loads(stored)
        times = {what: float(seconds) for what, seconds in held["times"].items()}
        if not all(math.isfinite(seconds) and seconds >= 0.0 for seconds in times.values()):
            raise ValueError("times are positive")
        return Counts(held["counts"]), times
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        log.warning("%s%s in Redis is not what Outrider writes there and is replaced: %s", _KEY, name, error)
        return Counts(), {}
