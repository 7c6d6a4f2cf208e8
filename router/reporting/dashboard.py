"""A snapshot of the router for `outrider top` and the live page, which poll it.

All counters are sums since the start, so two snapshots give rates. No prompt and no response is in a snapshot.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.resources import files
from typing import Any

from outrider.telemetry.pages import Page, PageContent, json_page
from router.reporting.recent_sums import RecentSums
from router.reporting.tree_view import ID_CHARACTERS, TreeView
from router.sessions.context import RouterContext
from router.sessions.generation import OwnedGeneration

MAX_LISTED = 200
PAGES = {"/": "index.html", "/live.js": "live.js", "/live.css": "live.css"}
KINDS = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}


def pages(
    router: RouterContext, running: Callable[[], Iterable[OwnedGeneration]], trees: TreeView, history: RecentSums
) -> dict[str, Page]:
    """Return the live page, its files, /live, the snapshot that it shows, /history, the sums of the last minutes,
    /tree/SESSION, the shape of one generation's tree, and /control, which the controllers decide from."""
    own = {path: _file(name) for path, name in PAGES.items()}
    return {
        **own,
        "/live": json_page(lambda: snapshot(router, running())),
        "/history": json_page(history.page),
        "/tree/": trees.page,
        "/control": json_page(lambda: estimates(router, running())),
    }


def estimates(router: RouterContext, running: Iterable[OwnedGeneration]) -> dict[str, Any]:
    """Return what this router's controllers estimate. May be called in another thread."""
    return {
        "priors": router.warm_start.estimates(),
        "tiers": router.decoding.tiers.estimates(),
        "generations": [
            {"session": generation.session_id[:ID_CHARACTERS], **generation.estimates()}
            for generation in [*running][:MAX_LISTED]
        ],
    }


def sums(router: RouterContext, running: Iterable[OwnedGeneration]) -> dict[str, Any]:
    """Return what charts are made of: sums since the start, and gamma now, None while nothing drafts."""
    metrics = router.decoding.metrics
    drafting = [generation.plan.depth for generation in running if generation.usage.speculation.now.drafting]
    return {
        "router": router.store.router_id,
        "time": time.time(),
        "tokens": metrics.tokens.total(),
        "steps": metrics.steps,
        "verified": metrics.depths.verified,
        "accepted": metrics.depths.accepted,
        "tried_by_depth": [*metrics.depths.tried],
        "reached_by_depth": [*metrics.depths.reached],
        "gamma": sum(drafting) / len(drafting) if drafting else None,
    }


def snapshot(router: RouterContext, running: Iterable[OwnedGeneration]) -> dict[str, Any]:
    """Return all figures. May be called in another thread."""
    metrics, generations = router.decoding.metrics, list(running)
    return {
        **sums(router, generations),
        "running": len(generations),
        "waiting": router.admission.depths(),
        "outcomes": metrics.outcomes(),
        "drafters": metrics.drafters(),
        "models": [_model(router, name, generations) for name in router.models],
        "workers": [
            {
                "id": worker.worker_id,
                "role": worker.role,
                "model": worker.model,
                "zone": " ".join(filter(None, (worker.zone, "dialed in" if worker.gate else ""))),
                "tier": worker.tier,
                "sessions": router.decoding.worker_pool.sessions(worker),
                "slots": worker.slots,
                "cores": worker.cores,
                "arm": worker.arm,
                "arm_reason": worker.arm_reason,
                "tokens_per_s": worker.tokens_per_s,
                "plain_tokens_per_s": worker.plain_tokens_per_s,
                "plain_error": worker.plain_error,
                "suspected": router.decoding.worker_pool.suspected(worker),
            }
            for worker in router.decoding.worker_pool.listed
        ],
        "generations": [_generation(generation) for generation in generations[:MAX_LISTED]],
    }


def _generation(generation: OwnedGeneration) -> dict[str, Any]:
    usage, plan = generation.usage, generation.plan
    return {
        "session": generation.session_id[:ID_CHARACTERS],
        "model": generation.model,
        "seconds": usage.elapsed_us() / 1e6,
        "tokens": usage.completion_tokens,
        "steps": usage.steps,
        "verified": usage.verified,
        "accepted": usage.accepted,
        "gamma": plan.depth,
        "width": plan.width,
        "verifier": generation.verifier,
        "drafters": generation.drafters,
        "speculation": usage.speculation.now.reason,
        "why": "" if usage.speculation.now.drafting else usage.speculation.now.explanation,
    }


def _model(router: RouterContext, name: str, generations: Iterable[OwnedGeneration]) -> dict[str, Any]:
    """Return a model's steps and its running generations by what kept them from verifying drafts, and drafters that
    cannot draft for it."""
    running = Counter(generation.usage.speculation.now.reason for generation in generations if generation.model == name)
    steps = {
        reason: count for (model, reason), count in tuple(router.decoding.metrics.speculation.items()) if model == name
    }
    misfits = [(worker.worker_id, why) for worker, why in router.decoding.worker_pool.misfits(name)[:MAX_LISTED]]
    return {"name": name, "running": running, "steps": steps, "misfits": misfits}


def _file(name: str) -> Page:
    content = PageContent(KINDS[name.rpartition(".")[2]], files("router.page").joinpath(name).read_bytes())
    return lambda: content
