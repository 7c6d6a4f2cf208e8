"""A session's drafters: attached in the background, replaced when they go missing. The session never waits for them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Container

from outrider.core.control.drafters.contributions import ContributionTracker, DrafterContribution
from outrider.core.control.drafters.tier_selection import Tiers, TierSwitch
from outrider.core.session.contract import StepReport
from outrider.core.session.speculation_status import SpeculationStatus
from outrider.store.registry import Worker
from outrider.wire.tickets import TicketSigner
from router.background import BackgroundTasks
from router.drafters.attached_drafters import AttachedDrafters, DraftAssignment
from router.scheduling.placement import DrafterPlacement, in_other_zone, place_drafters, should_rebalance
from router.scheduling.workers import WorkerPool

QUERY_AFTER_S = 0.25  # how long drafters may be missing before the router asks them for the reason
REPLACE_AFTER_S = 1.0  # how long drafters may be missing before they are replaced
REVIEW_S = 2.0  # between two reviews of where drafters are attached
DRAFTED_FIRST = 3  # drafted steps that are not measured after a tier change
POINTLESS_S = 5.0  # how long a drafter may bring nothing before one of another kind takes its place
POINTLESS = 0.05  # share of that time in whose steps drafts were accepted, below which they bring nothing
REPEATS, BRINGS_NOTHING = "others draft the same", "its drafts bring nothing"  # why a drafter is let go
SETTLING_STEPS = 8  # a tier change has settled after this many steps, with drafts or without

log = logging.getLogger(__name__)


class UsefulTime:
    """The share of a generation's time in whose steps drafts were accepted."""

    def __init__(self) -> None:
        self._last: float | None = None  # when the last step ended
        self._all_s = self._useful_s = 0.0

    def observe(self, now: float, *, useful: bool) -> None:
        """Add a step."""
        seconds = 0.0 if self._last is None else now - self._last
        self._last = now
        self._all_s += seconds
        self._useful_s += seconds * useful

    def take_pointless(self) -> bool:
        """Return whether drafts have brought nothing for long; then, or if they have, begin anew."""
        if self._all_s < POINTLESS_S:
            return False
        pointless = self._useful_s < POINTLESS * self._all_s
        self._all_s = self._useful_s = 0.0
        return pointless


class TierWindow:
    """Consecutive steps of a generation with the same tiers."""

    def __init__(self, present: Tiers, used: Tiers) -> None:
        self.present = present
        self.used = used
        self.tokens = 0  # of the steps that they drafted for
        self.seconds = 0.0
        self.rested_tokens = 0  # of the steps since then for which they rested, if they have drafted at all
        self.rested_s = 0.0
        self._steps, self._drafted = 0, 0  # since the tiers changed or drafters rested
        self._tried = False  # whether they have drafted at all
        self._last: float | None = None  # when the last step ended

    def observe(self, tokens: int, now: float, *, drafted: bool, resting: bool) -> None:
        """Add a step that committed `tokens` tokens, with or without drafts."""
        seconds = 0.0 if self._last is None else now - self._last
        self._last = now
        self._tried |= drafted
        if resting:
            self._steps, self._drafted = 0, 0
            if self._tried:
                self.rested_tokens += tokens
                self.rested_s += seconds
            return
        self.rested_tokens, self.rested_s = 0, 0.0
        self._steps += 1
        self._drafted += drafted
        if self._drafted > DRAFTED_FIRST or self._steps > SETTLING_STEPS:
            self.tokens += tokens
            self.seconds += seconds

    def take(self, long_rest_s: float) -> tuple[int, float, bool]:
        """Return the tokens and the seconds since the last call, and whether they were measured without drafting. A
        long rest counts instead of the steps before it; a short one goes on."""
        tokens, seconds, rested = self.tokens, self.seconds, self.rested_s >= long_rest_s
        self.tokens, self.seconds = 0, 0.0
        if rested:
            tokens, seconds = self.rested_tokens, self.rested_s
            self.rested_tokens, self.rested_s = 0, 0.0
        return tokens, seconds, rested


class DrafterSet:
    """The drafters of one session at one verifier, of all tiers. Nothing here blocks or fails the session."""

    def __init__(
        self,
        worker_pool: WorkerPool,
        background: BackgroundTasks,
        assignment: DraftAssignment,
        wanted: int,
        tiers: TierSwitch,
        ticket_signer: TicketSigner,
    ) -> None:
        """`wanted`: number of drafters of each tier."""
        self._worker_pool = worker_pool
        self._background = background
        self._assignment = assignment
        self._wanted = wanted
        self._tiers = tiers
        self._preferred = assignment.previous  # worker ids that are preferred at the first placement
        self._attached = AttachedDrafters(assignment, worker_pool, ticket_signer)
        self._worth: dict[int, ContributionTracker] = {}  # by tier
        self._declined: set[str] = set()  # worker ids of drafters that did not help
        self._reduced: Counter[int] = Counter()  # by tier: how many fewer are wanted since useless ones were detached
        self._expected_direct = wanted  # drafters that should subscribe at the verifier itself
        self._tier_window = TierWindow(frozenset(), frozenset())
        self._useful_time = UsefulTime()
        self._missing_since: float | None = None
        self._replaced: list[Worker] = []  # drafters that others have replaced, still attached
        self._queried = False  # the missing drafters were asked for the reason in this shortage
        self._all_answered_before = False  # at the last shortage all drafters answered, and none was replaced
        self._reviewed = time.monotonic()
        self._work = background.spawn(self._attach_missing())

    def estimates(self) -> dict[str, float]:
        """Return the accepted tokens per step that each drafter alone had drafted."""
        return {name: alone for worth in tuple(self._worth.values()) for name, alone in worth.estimates().items()}

    @property
    def drafter_ids(self) -> tuple[str, ...]:
        """Worker ids of drafters that an Attach was sent to and that have not failed."""
        return tuple(self._attached)

    @property
    def obstacle(self) -> SpeculationStatus | None:
        """What keeps drafters from drafting, as far as is known."""
        return self._attached.obstacles.foremost

    def observe(self, tokens: int, report: StepReport, contributions: tuple[DrafterContribution, ...] = ()) -> None:
        """Take a step: the tokens that it committed, the verifier's report, and what each drafter contributed.

        Start a repair when too few drafters have subscribed for a while. A drafter that never helps beside others of
        its tier is detached and serves other sessions; a tier without which the session is faster is left out.
        """
        now = time.monotonic()
        self._tier_window.observe(tokens, now, drafted=report.verified > 0, resting=report.resting)
        self._useful_time.observe(now, useful=report.accepted > 0)
        if contributions and not self._replaced:  # a replacement drafts the same as the drafter that it replaces
            self._drop_useless(contributions)
        if report.drafters >= self._expected_direct:
            self._missing_since, self._queried, self._all_answered_before = None, False, False
        elif self._missing_since is None:
            self._missing_since = now
        elif now - self._missing_since >= REPLACE_AFTER_S and self._work.done():
            self._missing_since = now
            self._work = self._background.spawn(self._replace_missing())
        elif now - self._missing_since >= QUERY_AFTER_S and not self._queried and self._work.done():
            self._queried = True
            self._work = self._background.spawn(self._query_attached())
        if self._work.done() and (now - self._reviewed >= REVIEW_S or self._tier_window_ended):
            self._reviewed = now
            self._work = self._background.spawn(
                self._review() if len(self._tier_window.present) > 1 else self._rebalance()
            )

    @property
    def _tier_window_ended(self) -> bool:
        """Whether the present tiers were measured for long enough."""
        window, greedy = self._tier_window, self._assignment.greedy
        return len(window.present) > 1 and (
            window.seconds >= self._tiers.window_s(window.present, greedy)
            or window.rested_s >= self._tiers.long_rest_s(window.present, greedy)
        )

    def detach_all(self) -> None:
        """Detach all drafters, in the background."""
        self._wanted = self._expected_direct = 0
        self._report_tier_rate()
        self._background.spawn(self._detach_after_work())

    def _drop_useless(self, contributions: tuple[DrafterContribution, ...]) -> None:
        """Detach a drafter that drafts nothing which others of its tier do not draft."""
        by_tier: dict[int, list[DrafterContribution]] = {}
        for each in contributions:
            if each.drafter_id in self._attached:
                by_tier.setdefault(self._attached[each.drafter_id].drafter.tier, []).append(each)
        for tier, shares in by_tier.items():
            tracker = self._worth.setdefault(tier, ContributionTracker())
            if len(shares) > 1 and (useless := tracker.observe(tuple(shares))) is not None:
                log.info("drafter %s is detached from session %s: %s", useless, self._assignment.session_id, REPEATS)
                self._declined.add(useless)
                self._reduced[tier] += 1
                self._expected_direct -= self._attached[useless].upstream is self._assignment.upstream
                self._background.spawn(self._attached.detach(self._attached[useless].drafter, REPEATS))

    def _report_tier_rate(self) -> None:
        """Report to the tier selection how fast the present tiers were."""
        window, greedy = self._tier_window, self._assignment.greedy
        tokens, seconds, rested = window.take(self._tiers.long_rest_s(window.present, greedy))
        self._tiers.observe(window.present, greedy, window.used, tokens, seconds, rested=rested)

    async def _detach_after_work(self) -> None:
        # An Attach on its way could overtake our Detach.
        await asyncio.wait([self._work])
        await asyncio.gather(*(self._attached.detach(placed.drafter) for placed in [*self._attached.values()]))

    async def _attach_missing(self) -> None:
        """Attach the best choices until there are enough of each tier that is to draft. If one fails, those that were
        to draft for it are placed elsewhere."""
        failed: set[str] = set()
        if not self._wanted and not await self._compatible_drafters():
            self._note_no_drafter()
        while self._wanted:
            for placed in await self._placements(failed):
                known = self._attached.get(placed.drafter.worker_id) == placed
                if not known and not await self._attached.attach(placed):
                    failed.add(placed.drafter.worker_id)
                    break
            else:
                break
        self._preferred = ()

    async def _placements(self, failed: Container[str] = ()) -> list[DrafterPlacement]:
        """Return where all drafters should be. Drafters whose tier is not to draft now are detached."""
        known = await self._compatible_drafters()
        drafters = [worker for worker in known if worker.worker_id not in self._declined]
        present = frozenset(worker.tier for worker in drafters)
        used = (
            frozenset(sorted(present)[:1])
            if self._assignment.single
            else self._tiers.wanted(present, self._assignment.greedy)
        )
        if (present, used) != (self._tier_window.present, self._tier_window.used):
            if self._tier_window.used:
                log.info(
                    "session %s: of tiers %s, %s draft", self._assignment.session_id, sorted(present), sorted(used)
                )
            self._tier_window = TierWindow(present, used)
        for placed in [*self._attached.values()]:
            if placed.drafter.tier not in used:
                await self._attached.detach(placed.drafter)
        drafters = [worker for worker in drafters if worker.tier in used and worker.worker_id not in failed]
        if len(used) > 1:  # a tier that failed lately is skipped, so that the tiers below it continue
            drafters = [worker for worker in drafters if not self._worker_pool.suspected(worker)]
        each = {tier: self._wanted - self._reduced[tier] for tier in used}
        readers = {
            it.worker_id for it in drafters if it.worker_id in self._preferred and not self._worker_pool.suspected(it)
        }
        places = place_drafters(self._assignment.upstream, drafters, each, readers | self._attached.keys())
        first = {placed.drafter.tier for placed in places if placed.upstream is self._assignment.upstream}
        self._expected_direct = sum(each[tier] for tier in first) or self._wanted
        if not known:
            self._note_no_drafter()
        else:
            suspects = [worker for worker in known if self._worker_pool.suspected(worker)]
            self._attached.obstacles.on_placed(places, suspects)
        return places

    def _note_no_drafter(self) -> None:
        upstream, sampled = self._assignment.upstream, self._assignment.single
        self._attached.obstacles.on_no_drafter(self._worker_pool.why_no_drafter(upstream, sampled=sampled))

    async def _compatible_drafters(self) -> list[Worker]:
        """Return the drafters that can draft for the session, best choice first."""
        assignment = self._assignment
        return await self._worker_pool.drafters(
            assignment.tokenizer_digest, assignment.upstream, sampled=assignment.single, tenant=assignment.tenant
        )

    async def _review(self) -> None:
        """Bring all drafters to where they should be, after some have gone or come, or other tiers have become better.
        A drafter that lost its upstream subscribes again when it gets another Attach."""
        self._report_tier_rate()
        for placed in [*self._attached.values()]:
            await self._attached.attach(placed)
        await self._attach_missing()

    async def _rebalance(self) -> None:
        """Move to a drafter of another kind if this one brings nothing, else to one that has fewer sessions: drafters
        come and go while sessions run. One that helps drafts until the next review, because the new one has to read the
        text first."""
        while self._replaced:
            await self._attached.detach(self._replaced.pop())
        if self._assignment.single:
            return  # the verifier takes one drafter at a time
        known = await self._compatible_drafters()
        mine = [worker for worker in known if worker.worker_id in self._attached]
        others = [worker for worker in known if worker not in mine and worker.worker_id not in self._declined]
        if not mine or not others:
            return
        unlike = [it for it in others if (it.model, it.zone, it.gate) != (mine[0].model, mine[0].zone, mine[0].gate)]
        if len(mine) == 1 and unlike and self._useful_time.take_pointless():
            if await self._attached.attach(DrafterPlacement(unlike[0], self._assignment.upstream)):
                self._declined.add(mine[0].worker_id)
                await self._attached.detach(mine[0], BRINGS_NOTHING)
            return
        here, other, zone = max(mine, key=self._worker_pool.sessions), others[0], self._assignment.upstream.zone
        if self._worker_pool.suspected(other) or in_other_zone(other.zone, zone) > in_other_zone(here.zone, zone):
            return
        moves = should_rebalance(self._worker_pool.sessions(here), self._worker_pool.sessions(other), random.random())
        if moves and await self._attached.attach(DrafterPlacement(other, self._assignment.upstream)):
            self._replaced.append(here)

    async def _query_attached(self) -> None:
        """Send Attach again to all drafters; their answers name what keeps them from drafting."""
        for placed in [*self._attached.values()]:
            await self._attached.attach(placed)

    async def _replace_missing(self) -> None:
        """Replace a missing drafter: one that does not answer, or else the oldest, since the verifier reports a count
        only."""
        previous = [placed for placed in self._attached.values() if placed.upstream is self._assignment.upstream]
        for placed in previous:
            await self._attached.attach(placed)
        silent = all(placed.drafter.worker_id in self._attached for placed in previous)  # although there are too few
        if silent and previous and self._all_answered_before:
            self._worker_pool.suspect(previous[0].drafter)
            await self._attached.detach(previous[0].drafter)
            silent = False
        self._all_answered_before = silent
        await self._attach_missing()
