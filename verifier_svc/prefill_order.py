"""Whose prompt is read next: fair shares between tenants, so that one's long prompts do not hold up the others'."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

from outrider.core.control.cost.budget import COST, CostModel
from verifier_svc.session import PrefillSession, VerifierSession

SLOWER = 2.0  # times as long as without it may a step be for another tenant's prompt
LEAST_CHUNK = 16  # tokens that a step reads in any case


class PrefillOrder:
    """The order in which sessions get a part of a step's prefill chunk.

    The tenant comes first of whose prompts the fewest tokens were read, and within a tenant the session that was opened
    first. A tenant that had nothing to read starts at the lowest count of those that have, so that nobody saves up
    credit (Sheng et al., arXiv 2401.00588, algorithm 2). Texts that are only prefilled come last.
    """

    def __init__(self) -> None:
        self._read: dict[str, int] = {}  # tokens, by tenant with a prompt to read

    def sort(self, ready: Iterable[VerifierSession]) -> list[VerifierSession]:
        """Return the sessions in that order; those that only decode come where they may."""
        sessions = list(ready)
        reading = {session.tenant for session in sessions if session.unread > 1}
        lowest = min((self._read[tenant] for tenant in reading & self._read.keys()), default=0)
        self._read = {tenant: self._read.get(tenant, lowest) for tenant in reading}
        return sorted(sessions, key=lambda one: (isinstance(one, PrefillSession), self._read.get(one.tenant, 0)))

    def add(self, tenant: str, tokens: int) -> None:
        """Count tokens of a tenant's prompt as read."""
        if tenant in self._read:
            self._read[tenant] += tokens


def chunk_beside_others(sessions: Sequence[VerifierSession], most: int, cost: CostModel) -> int:
    """Return how many prompt tokens a step of these sessions reads, `most` at most.

    Where several tenants share the step, it takes at most SLOWER times as long as if only the tenant that needs the
    fewest rows had its prompts read, by the measured cost of passes, or reads LEAST_CHUNK tokens.
    """
    decoding, reading = Counter[str](), Counter[str]()
    for session in sessions:
        if session.unread > 1:
            reading[session.tenant] = min(most, reading[session.tenant] + session.unread)
        else:
            decoding[session.tenant] += 1
    tenants = reading.keys() | decoding.keys()
    if not reading or len(tenants) == 1:
        return most
    rows, least = decoding.total(), min(tenants, key=lambda tenant: reading[tenant] + decoding[tenant])
    bound = SLOWER * (cost.seconds(rows + reading[least]) + COST.overhead_s) - COST.overhead_s
    fitting = bisect_right(range(1, most + 1), bound, key=lambda tokens: cost.seconds(rows + tokens))
    return min(most, max(fitting, LEAST_CHUNK))
