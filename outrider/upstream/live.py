"""The figures of remote drafts in the form of a router's page /live, so that `outrider top` shows them."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from outrider.core.session.speculation_status import SpeculationStatus
from outrider.upstream.foreign_session import DRAFTING, Row
from outrider.upstream.remote_drafts import MOST_SESSIONS, RemoteDrafts
from outrider.wire import drafter as wire

MAX_LISTED = 200


def snapshot(drafts: RemoteDrafts, model: str) -> dict[str, Any]:
    """Return all figures. May be called in any thread. `model`: as users know it."""
    counts, steering, rows = drafts.counts, drafts.control.steering, drafts.rows
    drafting = [len(row.given.tokens) for row in rows if row.given.tokens]
    depths = range(1, drafts.settings.depth + 1)
    engine = {
        "id": drafts.name,
        "role": "verifier",
        "model": model,
        "sessions": len(rows),
        "slots": MOST_SESSIONS,
        "arm": "" if steering is None else str(steering.governor.arm),
        "tokens_per_s": 0.0 if steering is None else steering.tokens_per_s,
        "plain_tokens_per_s": 0.0 if steering is None else steering.plain()[0],
    }
    return {
        "router": drafts.name,
        "time": time.time(),
        "tokens": counts.tokens,
        "steps": counts.reasons.total(),
        "verified": counts.drafted,
        "accepted": counts.accepted,
        "tried_by_depth": [_at_least(counts.tried, depth) for depth in depths],
        "reached_by_depth": [_at_least(counts.reached, depth) for depth in depths],
        "gamma": sum(drafting) / len(drafting) if drafting else None,
        "running": len(rows),
        "waiting": {},
        "drafters": {},
        "models": [{"name": model, "steps": {**counts.reasons}, "misfits": drafts.links.misfits}],
        "workers": [_UNKNOWN | engine, *(_UNKNOWN | _drafter(it) for it in drafts.links.described)],
        "generations": [_generation(row, model) for row in rows[:MAX_LISTED]],
    }


_UNKNOWN = {"zone": "", "tier": 0, "cores": 0.0, "arm": "", "tokens_per_s": 0.0, "plain_tokens_per_s": 0.0}
_UNKNOWN |= {"suspected": False}


def _at_least(counts: Counter[int], depth: int) -> int:
    """Return how many chains counted that many tokens or more."""
    return sum(count for tokens, count in tuple(counts.items()) if tokens >= depth)


def _drafter(it: wire.DrafterDescription) -> dict[str, Any]:
    own = {"id": it.worker_id, "role": "drafter", "model": it.model, "sessions": it.sessions, "slots": it.slots}
    return own | {"tier": it.tier}


def _generation(row: Row, model: str) -> dict[str, Any]:
    return {
        "session": row.name,
        "model": model,
        "seconds": time.monotonic() - row.opened,
        "tokens": row.length - row.began,
        "steps": row.steps,
        "verified": row.drafted,
        "accepted": row.accepted,
        "gamma": len(row.given.tokens),
        "drafters": row.drafters,
        "speculation": row.reason,
        "why": "" if row.reason is DRAFTING else SpeculationStatus(row.reason).explanation,
    }
