"""Acceptance priors shared by all routers, so that a new router does not learn them anew.

Not fenced, and eventually consistent: if two routers share at the same moment, the observations of one from a few
seconds are lost, which does no harm. The priors are numbers and contain no text.
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from outrider.core.control.depth.acceptance_stats import AcceptanceCounts
from outrider.core.control.depth.goodput import AcceptancePriors
from outrider.store.redis.client import Client, redis_errors

MAX_STEPS = 5_000.0  # steps that are remembered; older ones fade
TTL_S = 30 * 24 * 3600

_KEY = "outrider:{acceptance}:"

log = logging.getLogger(__name__)


async def share(redis: Client, name: str, priors: AcceptancePriors) -> None:
    """Add this router's new observations to the shared priors under `name`, and load the result into `priors`.

    Raises Unavailable when Redis cannot be used; the observations are kept then.
    """
    fresh, priors.fresh = priors.fresh, AcceptanceCounts()
    try:
        with redis_errors(redis):
            counts, times = load_priors(name, await redis.get(_KEY + name))
            if counts.steps > MAX_STEPS:
                counts.scale(MAX_STEPS / counts.steps)
            counts.add(fresh)
            times |= {kind: average.mean for kind, average in priors.times().items() if average.count}
            if fresh.steps:
                await redis.set(_KEY + name, json.dumps({"counts": counts.values(), "times": times}), ex=TTL_S)
    except BaseException:
        priors.fresh.add(fresh)
        raise
    counts.add(priors.fresh)  # observations made meanwhile
    priors.counts.copy_from(counts)
    for kind, average in priors.times().items():
        if not average.count and kind in times:
            average.observe(times[kind])


def load_priors(name: str, stored: bytes | str | None) -> tuple[AcceptanceCounts, dict[str, float]]:
    """Decode stored priors; empty priors for what cannot be decoded."""
    if stored is None:
        return AcceptanceCounts(), {}
    try:
        held: Any = json.loads(stored)
        times = {kind: float(seconds) for kind, seconds in held["times"].items()}
        if not all(math.isfinite(seconds) and seconds >= 0.0 for seconds in times.values()):
            raise ValueError("times are positive")
        return AcceptanceCounts(held["counts"]), times
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        log.warning("%s%s in Redis is not what Outrider writes there and is replaced: %s", _KEY, name, error)
        return AcceptanceCounts(), {}
