"""Whose prompt is read next: fair shares between tenants, so that one's long prompts do not hold up the others'."""

from __future__ import annotations

from collections.abc import Iterable

from verifier_svc.session import PrefillSession, VerifierSession


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
