"""How a drafter's scores are fitted to what targets choose: the fits that sessions of one kind share."""

from __future__ import annotations

from copy import deepcopy

from drafter_svc.mirrored_sessions import ScheduledSession
from drafter_svc.sessions.session import DrafterSession
from outrider.core.construction.expansion import DrafterFits


class SharedFits:
    """The fits of one engine's scores, by rule and temperature bucket."""

    def __init__(self) -> None:
        self._fits: dict[tuple[str, str], DrafterFits] = {}
        self._agreed_before: dict[str, tuple[int, int]] = {}  # counts with earlier engines

    def of(self, member: ScheduledSession, session: DrafterSession) -> DrafterFits:
        """Return the fits of a session's scores: those that sessions of one rule and temperature bucket share, or its
        own copy where it is not representative."""
        contract = session.contract
        kind = contract.rule, contract.temperature_bucket
        shared = self._fits.get(kind)
        if shared is None:
            shared = self._fits[kind] = DrafterFits()
        if session.representative:
            return shared
        if member.fits is None:
            member.fits = deepcopy(shared)
        return member.fits

    def agreement(self) -> dict[str, tuple[int, int]]:
        """Return, by temperature bucket, how many best candidates were the target's choice, of how many compared, in
        representative sessions."""
        counts = dict(self._agreed_before)
        for (_, bucket), fits in tuple(self._fits.items()):
            agreed, compared = counts.get(bucket, (0, 0))
            counts[bucket] = agreed + fits.agreed, compared + fits.compared
        return counts

    def restart(self) -> None:
        """Forget the fits, which are of another engine's scores now. Its agreement still counts."""
        self._agreed_before = self.agreement()
        self._fits.clear()
