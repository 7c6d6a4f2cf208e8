"""A session's drafters: attached in the background, replaced when they go missing, never waited for."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass

import grpc.aio

from outrider.core.credit import Credit, Worth
from outrider.core.speculation import SpeculationStatus
from outrider.core.tiers import TierChoice, Tiers
from outrider.rpc.spans import calling
from outrider.rpc.status import from_rpc_error
from outrider.rpc.tickets import Permit, sign
from outrider.store.registry import Worker
from outrider.telemetry.tracing import carried
from outrider.v1 import drafter_pb2
from outrider.v1.drafter_pb2_grpc import DrafterStub
from router.background import Background
from router.fleet import Fleet
from router.hindrances import Hindrances
from router.placement import Placed, apart, evens_out, place

ANSWER_S = 2.0  # a drafter that takes longer to answer is taken for dead
LOOK_S = 0.25  # how long drafters may be missing before they are asked why
SHORT_S = 1.0  # how long drafters may be missing before something is done about it
REVIEW_S = 2.0  # between two looks at where drafters are
SETTLING = 8  # steps after tiers have changed that tell nothing of them

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Post:
    """Where to draft, and for what."""

    session_id: str
    tenant: str
    epoch: int
    upstream: Worker  # the verifier
    tokenizer_digest: bytes
    greedy: bool
    single: bool  # whether it takes one drafter, and no tiers
    before: tuple[str, ...] = ()  # worker ids of those who drafted for it last: they have read the text


class Stretch:
    """Some steps of a generation that were drafted by the same tiers."""

    def __init__(self, present: Tiers, used: Tiers) -> None:
        self.present = present
        self.used = used
        self.tokens = 0
        self.seconds = 0.0
        self._steps = 0
        self._last = 0.0

    def observe(self, tokens: int, now: float) -> None:
        """A step committed so many tokens."""
        self._steps += 1
        if self._steps > SETTLING:
            self.tokens += tokens
            self.seconds += now - self._last
        self._last = now


class Drafters:
    """The drafters of one session at one verifier, of all tiers. Nothing here blocks or fails the session."""

    def __init__(
        self,
        fleet: Fleet,
        background: Background,
        post: Post,
        wanted: int,
        tiers: TierChoice,
        ticket_key: Callable[[], Awaitable[bytes]],
    ) -> None:
        """`wanted`: how many of each tier."""
        self._fleet = fleet
        self._background = background
        self._post = post
        self._wanted = wanted
        self._tiers = tiers
        self._ticket_key = ticket_key
        self._before = post.before  # preferred, the first time
        self._attached: dict[str, Placed] = {}
        self._worths: dict[int, Worth] = {}  # by tier
        self._hindrances = Hindrances(post.upstream)
        self._declined: set[str] = set()  # worker ids of those that did not help
        self._lost: Counter[int] = Counter()  # how many fewer are wanted of a tier for that
        self._direct = wanted  # drafters that the verifier is to have
        self._stretch = Stretch(frozenset(), frozenset())
        self._short_since: float | None = None
        self._leaving: list[Worker] = []  # drafters whose place another has taken
        self._asked_why = False  # in the present shortage
        self._asked_again = False  # the last shortage ended with the same drafters, all of them answering
        self._reviewed = time.monotonic()
        self._work = background.spawn(self._fill())

    @property
    def names(self) -> tuple[str, ...]:
        """Worker ids of those that were asked and have not failed."""
        return tuple(self._attached)

    @property
    def hindrance(self) -> SpeculationStatus | None:
        """What keeps drafters away, as far as is known."""
        return self._hindrances.foremost

    def observe(self, tokens: int, subscribed: int, owed: tuple[Credit, ...] = ()) -> None:
        """Takes the tokens of a step, the number of drafters that the verifier had, and what it owed to each where
        there were several.

        Sees to it when too few had subscribed for a while. One that never helps beside others of its tier is let go,
        for other sessions to use; a tier without which it goes faster is left out.
        """
        now = time.monotonic()
        self._stretch.observe(tokens, now)
        if owed and not self._leaving:  # who has just come drafts what the one before does
            self._judge(owed)
        if subscribed >= self._direct:
            self._short_since, self._asked_why, self._asked_again = None, False, False
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since >= SHORT_S and self._work.done():
            self._short_since = now
            self._work = self._background.spawn(self._repair())
        elif now - self._short_since >= LOOK_S and not self._asked_why and self._work.done():
            self._asked_why = True
            self._work = self._background.spawn(self._ask_why())
        if now - self._reviewed >= REVIEW_S and self._work.done():
            self._reviewed = now
            self._work = self._background.spawn(self._review() if len(self._stretch.present) > 1 else self._even_out())

    def dismiss(self) -> None:
        """Detaches all, in the background."""
        self._wanted = self._direct = 0
        self._report()
        self._background.spawn(self._leave())

    def _judge(self, owed: tuple[Credit, ...]) -> None:
        """Lets one go that drafts nothing which others of its tier do not."""
        by_tier: dict[int, list[Credit]] = {}
        for credit in owed:
            if credit.drafter_id in self._attached:
                by_tier.setdefault(self._attached[credit.drafter_id].drafter.tier, []).append(credit)
        for tier, shares in by_tier.items():
            useless = self._worths.setdefault(tier, Worth()).observe(tuple(shares)) if len(shares) > 1 else None
            if useless is not None:
                log.info("drafter %s drafts nothing for session %s that others do not", useless, self._post.session_id)
                self._declined.add(useless)
                self._lost[tier] += 1
                self._direct -= self._attached[useless].upstream is self._post.upstream
                self._background.spawn(self._detach(self._attached[useless].drafter))

    def _report(self) -> None:
        """Says how fast it went with the present tiers."""
        done = self._stretch
        self._tiers.observe(done.present, self._post.greedy, done.used, done.tokens, done.seconds)
        self._stretch = Stretch(done.present, done.used)

    async def _leave(self) -> None:
        # An Attach on its way could overtake our Detach.
        await asyncio.wait([self._work])
        await asyncio.gather(*(self._detach(placed.drafter) for placed in [*self._attached.values()]))

    async def _fill(self) -> None:
        """Attaches the best choices until there are enough of each tier that is to draft. If one fails, those that were
        to draft for it are placed elsewhere."""
        failed: set[str] = set()
        while self._wanted:
            for placed in await self._places(failed):
                known = self._attached.get(placed.drafter.worker_id) == placed
                if not known and not await self._attach(placed):
                    failed.add(placed.drafter.worker_id)
                    break
            else:
                break
        self._before = ()

    async def _places(self, failed: Container[str] = ()) -> list[Placed]:
        """Where all should be. Those whose tier is not to draft now are let go."""
        known = await self._known()
        drafters = [worker for worker in known if worker.worker_id not in self._declined]
        present = frozenset(worker.tier for worker in drafters)
        used = frozenset(sorted(present)[:1]) if self._post.single else self._tiers.wanted(present, self._post.greedy)
        if (present, used) != (self._stretch.present, self._stretch.used):
            if self._stretch.used:
                log.info("session %s: of tiers %s, %s draft", self._post.session_id, sorted(present), sorted(used))
            self._stretch = Stretch(present, used)
        for placed in [*self._attached.values()]:
            if placed.drafter.tier not in used:
                await self._detach(placed.drafter)
        drafters = [worker for worker in drafters if worker.tier in used and worker.worker_id not in failed]
        if len(used) > 1:  # a tier that failed lately is skipped, so that those below it go on
            drafters = [worker for worker in drafters if not self._fleet.suspected(worker)]
        each = {tier: self._wanted - self._lost[tier] for tier in used}
        readers = {it.worker_id for it in drafters if it.worker_id in self._before and not self._fleet.suspected(it)}
        places = place(self._post.upstream, drafters, each, readers | self._attached.keys())
        first = {placed.drafter.tier for placed in places if placed.upstream is self._post.upstream}
        self._direct = sum(each[tier] for tier in first) or self._wanted
        if not known:
            self._hindrances.nobody(self._fleet.without_drafter(self._post.upstream, sampled=self._post.single))
        else:
            self._hindrances.placed(places, [worker for worker in known if self._fleet.suspected(worker)])
        return places

    async def _known(self) -> list[Worker]:
        """The drafters that can draft for the session, best choice first."""
        post = self._post
        return await self._fleet.drafters(post.tokenizer_digest, post.upstream, sampled=post.single)

    async def _review(self) -> None:
        """Sees that all are where they should be, be it that some have gone, or come, or that other tiers are better.
        Whoever has lost its upstream attaches itself again when it is asked to."""
        self._report()
        for placed in [*self._attached.values()]:
            await self._attach(placed)
        await self._fill()

    async def _even_out(self) -> None:
        """Moves to a drafter that has fewer sessions, if there is one: they come and go while sessions run. The one
        before goes on until the next look, for the new one has to read the text."""
        while self._leaving:
            await self._detach(self._leaving.pop())
        if self._post.single:
            return  # its verifier takes one drafter at a time
        known = await self._known()
        mine = [worker for worker in known if worker.worker_id in self._attached]
        others = [worker for worker in known if worker not in mine and worker.worker_id not in self._declined]
        if not mine or not others:
            return
        here, other, zone = max(mine, key=self._fleet.sessions), others[0], self._post.upstream.zone
        if self._fleet.suspected(other) or apart(other.zone, zone) > apart(here.zone, zone):
            return
        moves = evens_out(self._fleet.sessions(here), self._fleet.sessions(other), random.random())
        if moves and await self._attach(Placed(other, self._post.upstream)):
            self._leaving.append(here)

    async def _ask_why(self) -> None:
        """Has those that do not show up at the verifier answer what keeps them away."""
        for placed in [*self._attached.values()]:
            await self._attach(placed)

    async def _repair(self) -> None:
        """Replaces whoever is missing: who does not answer, or else, since a count does not tell, the oldest."""
        before = [placed for placed in self._attached.values() if placed.upstream is self._post.upstream]
        for placed in before:
            await self._attach(placed)
        silent = all(placed.drafter.worker_id in self._attached for placed in before)  # and yet there are too few
        if silent and before and self._asked_again:
            self._fleet.suspect(before[0].drafter)
            await self._detach(before[0].drafter)
            silent = False
        self._asked_again = silent
        await self._fill()

    async def _attach(self, placed: Placed) -> bool:
        """Attaches one; drops it and says False if it does not answer. Repeating it changes nothing at the drafter."""
        worker = placed.drafter
        if worker.worker_id not in self._attached:
            self._fleet.take(worker)
        # Counted from here on, so that `dismiss` detaches it even if it has yet to answer.
        self._attached[worker.worker_id] = placed
        post = self._post
        permit = Permit(post.session_id, post.tenant, worker.worker_id, placed.upstream.worker_id, post.epoch)
        try:
            request = drafter_pb2.AttachRequest(
                session_id=post.session_id,
                tenant=post.tenant,
                epoch=post.epoch,
                upstream=placed.upstream.address,
                ticket=sign(await self._ticket_key(), permit),
            )
            with calling("outrider.v1.Drafter/Attach"):
                stub = DrafterStub(self._fleet.channel(worker))
                answer = await stub.Attach(request, timeout=ANSWER_S, metadata=carried())
            self._hindrances.answered(placed, answer, self._attached)
            return True
        except grpc.aio.AioRpcError as error:
            known = from_rpc_error(error)
            log.info("drafter %s is no use: %s", worker.worker_id, known)
            self._fleet.failed(worker, known)
            self._hindrances.failed(placed, known)
            if self._attached.pop(worker.worker_id, None) is not None:
                self._fleet.release(worker)
            return False

    async def _detach(self, worker: Worker) -> None:
        if self._attached.pop(worker.worker_id, None) is None:
            return
        self._hindrances.forget(worker)
        request = drafter_pb2.DetachRequest(session_id=self._post.session_id, epoch=self._post.epoch)
        try:
            await DrafterStub(self._fleet.channel(worker)).Detach(request, timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            log.debug("drafter %s did not answer Detach: %s", worker.worker_id, from_rpc_error(error))
        finally:
            self._fleet.release(worker)
