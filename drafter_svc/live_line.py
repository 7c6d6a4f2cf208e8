"""What a drafter that dials brings, in a line that a terminal keeps up to date; elsewhere in the log, once a minute."""

from __future__ import annotations

import asyncio
import logging
import sys
import time

from drafter_svc.gate_link import GateLink
from drafter_svc.scheduler import DraftScheduler
from drafter_svc.servicer import DrafterServicer

LINE_S = 1.0
LOGGED_S = 60.0
SMOOTHING = 0.2  # weight of the last second in the rate

log = logging.getLogger(__name__)


class LiveLine:
    """The line of one drafter."""

    def __init__(self, link: GateLink, servicer: DrafterServicer) -> None:
        self._link = link
        self._servicer = servicer
        self._scheduler = servicer.scheduler
        self._chosen = 0  # tokens that the drafter had right, as counted last
        self._rate = 0.0  # of them, in a second

    async def run(self) -> None:
        """Show it until cancelled."""
        shown, due = sys.stderr.isatty(), time.monotonic() + LOGGED_S
        while True:
            await asyncio.sleep(LINE_S)
            self._count()
            if shown:
                print(f"\r\x1b[K{self}", end="", file=sys.stderr, flush=True)
            elif time.monotonic() >= due:
                due += LOGGED_S
                log.info("%s", self)

    def _count(self) -> None:
        if isinstance(self._scheduler, DraftScheduler):
            chosen = sum(agreed for agreed, _ in self._scheduler.fits.agreement().values())
            self._rate += SMOOTHING * ((chosen - self._chosen) / LINE_S - self._rate)
            self._chosen = chosen

    def __str__(self) -> str:
        link, sessions = self._link, len(self._scheduler.members)
        if not link.open:
            return f"{link.address} does not answer; dialing again"
        all_of_it = link.cluster_tokens_per_s
        share = f", {min(1.0, self._rate / all_of_it):.0%} of the cluster's" if all_of_it and self._rate else ""
        way = " through the router" if link.relayed else ""
        let_go = f"; let go by a session: {self._servicer.let_go}" if self._servicer.let_go else ""
        return (
            f"{link.address}: {sessions} session{'' if sessions == 1 else 's'}{way}{self._resting()}, "
            f"{self._rate:.0f} tokens/s right{share}, round trip {1e3 * link.round_trip_s:.0f} ms{let_go}"
        )

    def _resting(self) -> str:
        """Say for how many sessions nothing is drafted, because it would cost more than it brings."""
        if not isinstance(self._scheduler, DraftScheduler):
            return ""
        members = [it.session for it in self._scheduler.members.values() if it.session is not None]
        resting = sum(not it.worth_drafting for it in members)
        return f" ({resting} of them without drafts, which would not pay)" if resting else ""
