"""The router at this moment, for people who watch: `outrider top` and the page ask for it again and again.

Everything that is counted is a sum since the start; whoever asks twice sees rates. No prompt and no answer is in it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import Any

from outrider.telemetry.pages import Content, Page
from router.generation import Generation
from router.opening import Cluster

MOST = 200  # generations that are listed
SHOWN_OF_AN_ID = 8  # characters: enough to tell one from another
PAGES = {"/": "index.html", "/live.js": "live.js", "/live.css": "live.css"}
KINDS = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}


def pages(cluster: Cluster, running: Callable[[], Iterable[Generation]]) -> dict[str, Page]:
    """The page, what belongs to it, and /live, the figures that it shows."""
    own = {path: _file(name) for path, name in PAGES.items()}
    return {**own, "/live": lambda: Content("application/json", json.dumps(glance(cluster, running())).encode())}


def glance(cluster: Cluster, running: Iterable[Generation]) -> dict[str, Any]:
    """All figures. May be called in another thread."""
    metrics, generations = cluster.metrics, list(running)
    return {
        "router": cluster.router_id,
        "time": time.time(),
        "running": len(generations),
        "waiting": cluster.admission.depths(),
        "outcomes": metrics.outcomes(),
        "tokens": metrics.tokens.total(),
        "steps": metrics.steps,
        "verified": metrics.depths.verified,
        "accepted": metrics.depths.accepted,
        "tried_by_depth": metrics.depths.tried,
        "reached_by_depth": metrics.depths.reached,
        "drafters": metrics.drafters(),
        "models": [_model(cluster, name, generations) for name in cluster.models],
        "workers": [
            {
                "id": worker.worker_id,
                "role": worker.role,
                "model": worker.model,
                "zone": worker.zone,
                "tier": worker.tier,
                "sessions": cluster.fleet.sessions(worker),
                "slots": worker.slots,
                "suspected": cluster.fleet.suspected(worker),
            }
            for worker in cluster.fleet.listed
        ],
        "generations": [_generation(one) for one in generations[:MOST]],
    }


def _generation(one: Generation) -> dict[str, Any]:
    figures, plan = one.figures, one.plan
    return {
        "session": one.session_id[:SHOWN_OF_AN_ID],
        "model": one.model,
        "seconds": figures.elapsed_us() / 1e6,
        "tokens": figures.completion_tokens,
        "steps": figures.steps,
        "verified": figures.verified,
        "accepted": figures.accepted,
        "gamma": plan.depth,
        "width": plan.width,
        "verifier": one.verifier,
        "drafters": one.drafters,
        "speculation": figures.speculation.now.reason,
        "why": "" if figures.speculation.now.drafting else figures.speculation.now.explanation,
    }


def _model(cluster: Cluster, name: str, generations: Iterable[Generation]) -> dict[str, Any]:
    """Steps of a model by what kept them from verifying drafts, its running generations likewise, and drafters that are
    not for it."""
    running = Counter(one.figures.speculation.now.reason for one in generations if one.model == name)
    steps = {reason: count for (model, reason), count in tuple(cluster.metrics.speculation.items()) if model == name}
    misfits = [(worker.worker_id, status.explanation) for worker, status in cluster.fleet.misfits(name)[:MOST]]
    return {"name": name, "running": running, "steps": steps, "misfits": misfits}


def _file(name: str) -> Page:
    content = Content(KINDS[name.rpartition(".")[2]], files("router.page").joinpath(name).read_bytes())
    return lambda: content
