"""Where a session's drafters go: tiers, each of which drafts for the one above it, and the first for the verifier."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from outrider.store.registry import TOP, Worker


class Placed(NamedTuple):
    """A drafter, and whom it drafts for."""

    drafter: Worker
    upstream: Worker


def place(
    verifier: Worker, drafters: Sequence[Worker], each: Mapping[int, int], keep: Container[str] = ()
) -> list[Placed]:
    """Of every tier at most as many drafters as `each` says, those to `keep` first, then in the order given; tiers from
    above to below.

    A tier of which nobody is there, or nobody that can be an upstream, is skipped: the tier below it drafts for the one
    above.
    """
    above = {drafter.tier: drafter.above for drafter in drafters}
    upstreams = {TOP: verifier}
    placed = []
    for tier in sorted(above):
        mine = sorted(
            (drafter for drafter in drafters if drafter.tier == tier), key=lambda drafter: drafter.worker_id not in keep
        )[: each.get(tier, 0)]
        upper = above[tier]
        while upper not in upstreams:
            upper = min(above.get(upper, upper - 1), upper - 1)
        placed += [Placed(drafter, upstreams[upper]) for drafter in mine]
        serving = next((drafter for drafter in mine if drafter.serves), None)
        if serving is not None:
            upstreams[tier] = serving
    return placed
