"""Where a session goes, and its drafters: tiers, each of which drafts for the one above it, and the first for the
verifier."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from outrider.store.registry import TOP, Worker

# Of a verifier's slots: who is fuller than another by so much comes behind it, though
OTHER_ZONE = 0.25  # that one is in another zone than we are
PREFIX = 0.125  # it has all of the text's KV from other texts, and in proportion for less


class Prospect(NamedTuple):
    """A verifier that a session may go to."""

    worker: Worker
    suspected: bool  # it failed lately
    holds: bool  # it has the session's KV
    load: float  # sessions there for each slot
    full: bool  # it has no place now
    wait_s: float  # until it is expected to have one, where it is full; 0: not known
    near: bool  # it is in our zone
    shared: int = 0  # of the text's first tokens, whose KV it has from other texts


def preferred(prospects: Sequence[Prospect], tokens: int) -> list[Worker]:
    """The order in which they are tried by a session of so many tokens: where its KV is, then by load, zone, and what
    it shares with other texts there.

    A full verifier that has the KV comes first only while waiting for it takes less time than reading the tokens anew
    at the best of the others.
    """
    ranked = sorted(prospects, key=lambda it: (it.suspected, it.full, _price(it, tokens)))
    holder = next((it for it in ranked if it.holds and not it.suspected), None)
    others = [it for it in ranked if it is not holder]
    if holder is not None and (not holder.full or not others or holder.wait_s <= _read_s(others[0], tokens)):
        ranked = [holder, *others]
    return [it.worker for it in ranked]


def _price(prospect: Prospect, tokens: int) -> float:
    """What speaks against a verifier, in shares of its slots."""
    elsewhere = 0.0 if prospect.near else OTHER_ZONE
    return prospect.load + elsewhere - PREFIX * prospect.shared / max(1, tokens)


def _read_s(prospect: Prospect, tokens: int) -> float:
    """Seconds that reading so many tokens takes there, and waiting for that; 0: not known."""
    unread = max(0, tokens - prospect.shared)
    return prospect.wait_s + (unread / prospect.worker.prefill if prospect.worker.prefill else 0.0)


def apart(zone: str, other: str) -> bool:
    """Whether two are in different zones, as far as they say."""
    return bool(zone and other and zone != other)


def evens_out(here: int, there: int, chance: float) -> bool:
    """Whether a session should go from a drafter that has so many to another.

    Sessions do not ask each other: with a `chance` drawn from 0 to 1 by each, as many go as even the two out.
    """
    return here - there >= 2 and chance < (here - there) / 2 / here


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
