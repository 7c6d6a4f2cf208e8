"""Where a session goes, and its drafters: tiers, each of which drafts for the one above it, and the first for the
verifier."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from outrider.store.registry import TOP, Worker

# A verifier may be fuller than another one by this share of its slots and still rank equal to it:
OTHER_ZONE = 0.25  # if the other one is in another zone than this router
PREFIX = 0.125  # if it has all of the text's KV from other texts; in proportion for less


class VerifierCandidate(NamedTuple):
    """A verifier that a session may go to."""

    worker: Worker
    suspected: bool  # it failed lately
    holds: bool  # it has the session's KV
    load: float  # sessions there for each slot
    full: bool  # it has no free slot
    wait_s: float  # expected wait for a free slot, if it is full; 0: not known
    near: bool  # it is in our zone
    shared: int = 0  # tokens at the text's beginning whose KV it has from other texts


def order_candidates(candidates: Sequence[VerifierCandidate], tokens: int) -> list[Worker]:
    """Return the order in which a session of `tokens` tokens tries verifiers: first the one that has its KV, then by
    load, zone and the prefix shared with other texts there.

    A full verifier that has the KV comes first only while waiting for it takes less time than reading the tokens anew
    at the best of the others.
    """
    ranked = sorted(candidates, key=lambda it: (it.suspected, it.full, _cost(it, tokens)))
    holder = next((it for it in ranked if it.holds and not it.suspected), None)
    others = [it for it in ranked if it is not holder]
    if holder is not None and (not holder.full or not others or holder.wait_s <= _prefill_s(others[0], tokens)):
        ranked = [holder, *others]
    return [it.worker for it in ranked]


def _cost(candidate: VerifierCandidate, tokens: int) -> float:
    """Return what ranks a verifier lower, in shares of its slots."""
    elsewhere = 0.0 if candidate.near else OTHER_ZONE
    return candidate.load + elsewhere - PREFIX * candidate.shared / max(1, tokens)


def _prefill_s(candidate: VerifierCandidate, tokens: int) -> float:
    """Return the seconds that the wait and the prefill of `tokens` tokens take there; 0: not known."""
    unread = max(0, tokens - candidate.shared)
    return candidate.wait_s + (unread / candidate.worker.prefill if candidate.worker.prefill else 0.0)


def in_other_zone(zone: str, other: str) -> bool:
    """Return whether two zones differ; an empty zone is not known and differs from none."""
    return bool(zone and other and zone != other)


def should_rebalance(here: int, there: int, chance: float) -> bool:
    """Return whether a session should move from a drafter with `here` sessions to one with `there`.

    Each session decides alone, with a `chance` drawn from 0 to 1, so that as many move as even the two out.
    """
    return here - there >= 2 and chance < (here - there) / 2 / here


class DrafterPlacement(NamedTuple):
    """A drafter, and the upstream that it drafts for."""

    drafter: Worker
    upstream: Worker


def place_drafters(
    verifier: Worker, drafters: Sequence[Worker], per_tier: Mapping[int, int], keep: Container[str] = ()
) -> list[DrafterPlacement]:
    """Place at most `per_tier[tier]` drafters of every tier, those in `keep` first, then in the order given. Return the
    placements from the top tier down.

    A tier without drafters, or without one that can be an upstream, is skipped: the tier below it drafts for the one
    above.
    """
    above = {drafter.tier: drafter.above for drafter in drafters}
    upstreams = {TOP: verifier}
    placed = []
    for tier in sorted(above):
        mine = sorted(
            (drafter for drafter in drafters if drafter.tier == tier), key=lambda drafter: drafter.worker_id not in keep
        )[: per_tier.get(tier, 0)]
        upper = above[tier]
        while upper not in upstreams:
            upper = min(above.get(upper, upper - 1), upper - 1)
        placed += [DrafterPlacement(drafter, upstreams[upper]) for drafter in mine]
        serving = next((drafter for drafter in mine if drafter.serves), None)
        if serving is not None:
            upstreams[tier] = serving
    return placed
