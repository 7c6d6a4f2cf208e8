"""Admission: a generation begins when there is a place, waits its turn in a bounded queue, or is refused at once."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from outrider.config import RouterConfig
from outrider.errors import DeadlineExceeded, Moved, Overloaded
from router.fair_queue import Claim, FairQueue, Priority
from router.rates import Buckets, Stay

OUTPUT_WEIGHT = 2.0  # a token of the answer costs about what two of the prompt cost, as in arXiv 2401.00588
SOONEST_S, LATEST_S = 0.1, 30.0  # that a refusal asks to come back after
UNKNOWN_S = 1.0  # the same while nothing was measured
GOING_DOWN = "this router is going down; another one goes on"


@dataclass(eq=False, slots=True)
class _Waiter:
    """Somebody in the queue."""

    claim: Claim
    granted: asyncio.Future[None]


class Admission:
    """How many generations may be placed at once, and who is next.

    `places(model)`: how many of ours the model's verifiers can hold by what is known now; None when nobody serves it,
    and then nobody waits either: whoever begins hears so. `dispatch` is to be called when that may have changed.
    """

    def __init__(
        self,
        config: RouterConfig,
        places: Callable[[str], int | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.clock = clock
        self.stays: defaultdict[str, Stay] = defaultdict(Stay)  # by model
        self._config = config
        self._places = places
        self._jitter = jitter
        self._queues: dict[str, FairQueue[_Waiter]] = {}  # by model
        self._held: Counter[str] = Counter()  # places, by model
        self._tenants: Counter[str] = Counter()  # places, by tenant
        self._closed = False
        per_s, per_min = config.tenant_requests_per_s, config.tenant_tokens_per_min
        self._requests = Buckets(per_s, max(1.0, per_s), clock) if per_s else None
        self.tokens = Buckets(per_min / 60, per_min, clock) if per_min else None  # what places spend

    @property
    def held(self) -> int:
        """Places that are taken."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Generations in the queue."""
        return sum(map(len, self._queues.values()))

    def waited_for(self, claim: Claim) -> bool:
        """Whether somebody waits who could have the place of this claim."""
        most = self._config.tenant_sessions
        full = self.held >= self._config.max_sessions  # then one of any model helps those of all

        def helped(other: Claim) -> bool:
            return self._eligible(other) or (most is not None and other.tenant == claim.tenant)

        queues = self._queues.items()
        return any(queue.any(helped) for model, queue in queues if full or model == claim.model)

    def depths(self) -> dict[str, float]:
        """Of the queue, by priority. May be called in another thread."""
        queues = tuple(self._queues.values())
        return {kind.name.lower(): float(sum(queue.waiting(kind) for queue in queues)) for kind in Priority}

    @asynccontextmanager
    async def place(self, claim: Claim, *, holds_one: bool = False) -> AsyncIterator[Place]:
        """A place for as long as the body runs. `holds_one`: it takes over from one of ours that is about to leave.

        Raises Overloaded at once where the queue is full, the tenant is over its rate or the deadline would pass, and
        later where it waited for too long; DeadlineExceeded when the deadline has passed; Moved when `close` is called.
        """
        if claim.priority is not Priority.RESUMED:
            self._check_rates(claim.tenant)
        if holds_one:
            self._grant(claim)
        else:
            await self.take(claim)
        place = Place(self, claim)
        try:
            yield place
        finally:
            place.leave()

    def dispatch(self) -> None:
        """Gives the places that there are to those whose turn it is."""
        for model, queue in self._queues.items():
            while self._room(model) and (waiter := queue.pop(self._eligible)) is not None:
                self._grant(waiter.claim)
                waiter.granted.set_result(None)

    def close(self) -> None:
        """From now on everybody hears that this router is going down, also who waits."""
        self._closed = True
        for queue in self._queues.values():
            while (waiter := queue.pop(lambda claim: True)) is not None:
                waiter.granted.set_exception(Moved(GOING_DOWN))

    async def take(self, claim: Claim, refused: str = "") -> None:
        """Waits for a place. `refused`: why a verifier refused the last one, if that is how it came here."""
        if self._closed:
            raise Moved(GOING_DOWN)
        queue = self._queues.setdefault(claim.model, FairQueue())
        ahead = queue.ahead(claim)
        waiter = _Waiter(claim, asyncio.get_running_loop().create_future())
        queue.push(claim, waiter)
        self.dispatch()
        if waiter.granted.done():
            return
        try:
            limit = self._limit(claim, queue, ahead, refused)
            try:
                async with asyncio.timeout(limit):
                    await asyncio.shield(waiter.granted)
            except TimeoutError:
                if claim.deadline is not None and self.clock() >= claim.deadline:
                    raise DeadlineExceeded("the call's time ran out while it waited for a place") from None
                raise self._refusal(claim, f"no place became free within {limit:.1f} s", ahead) from None
        except BaseException:
            if not waiter.granted.done():
                queue.remove(claim, waiter)
            elif not waiter.granted.exception():  # it was given one in the very moment that it left
                self.give_back(claim, claim.tokens)
                self.dispatch()
            raise

    def _limit(self, claim: Claim, queue: FairQueue[_Waiter], ahead: int, refused: str) -> float:
        """Seconds that it may wait. Raises Overloaded where it may not, or in vain."""
        config = self._config
        before = f"{refused}; " if refused else ""
        if queue.waiting(claim.priority) > config.queue:
            raise self._refusal(claim, f"{before}all places are taken and {config.queue} wait (queue)", ahead)
        if queue.waiting(claim.priority, claim.tenant) > config.queue_per_tenant:
            yours = f"{config.queue_per_tenant} of yours wait (queue_per_tenant)"
            raise self._refusal(claim, f"{before}all places are taken and {yours}", ahead)
        limit = config.queue_s
        if claim.deadline is not None:
            limit = min(limit, claim.deadline - self.clock())
        expected = self.stays[claim.model].wait_s(ahead, self._most(claim.model))
        if expected is not None and expected > limit:
            raise self._refusal(claim, f"{before}a place is expected in {expected:.1f} s, later than you wait", ahead)
        return max(0.0, limit)

    def _refusal(self, claim: Claim, problem: str, ahead: int) -> Overloaded:
        """Says when it is worth coming back: those who are told so together do not come back together."""
        expected = self.stays[claim.model].wait_s(ahead, self._most(claim.model))
        after = UNKNOWN_S if expected is None else min(max(expected, SOONEST_S), LATEST_S)
        after *= self._jitter(1.0, 1.5)
        return Overloaded(f"{problem}; come back in {after:.1f} s", retry_after=after)

    def _check_rates(self, tenant: str) -> None:
        for buckets, wanted, name in (
            (self._requests, 1.0, "tenant_requests_per_s"),
            (self.tokens, 1.0, "tenant_tokens_per_min"),
        ):
            if buckets is not None and (wait := buckets.wait_s(tenant, wanted)) > 0:
                raise Overloaded(
                    f"this tenant is over its rate ({name}); come back in {wait:.1f} s",
                    retry_after=max(wait, SOONEST_S),
                )
        if self._requests is not None:
            self._requests.take(tenant, 1.0)

    def _most(self, model: str) -> int:
        """Places that ours may have at once."""
        known = self._places(model)
        return self._config.max_sessions if known is None else min(known, self._config.max_sessions)

    def _room(self, model: str) -> bool:
        """Whether one more may be placed. Those that were told and have yet to run count."""
        if self.held >= self._config.max_sessions:
            return False
        known = self._places(model)
        return known is None or self._held[model] < known

    def _eligible(self, claim: Claim) -> bool:
        most = self._config.tenant_sessions
        return most is None or self._tenants[claim.tenant] < most

    def _grant(self, claim: Claim) -> None:
        self._held[claim.model] += 1
        self._tenants[claim.tenant] += 1

    def give_back(self, claim: Claim, unspent: float) -> None:
        """Takes a place back, and what its tenant was charged with beyond what it spent. `dispatch` comes next."""
        self._held[claim.model] -= 1
        self._tenants[claim.tenant] -= 1
        self._tenants += Counter()  # forgets those that have none
        self._queues.setdefault(claim.model, FairQueue()).charge(claim.tenant, -unspent)


class Answers:
    """How many answers are held in memory at once: with places, or without because their clients do not read or because
    they have ended and are read again."""

    def __init__(self, config: RouterConfig) -> None:
        self._most_of_tenant = config.max_sessions + config.queue
        self._most = 2 * self._most_of_tenant
        self._held: Counter[str] = Counter()  # by tenant

    @contextmanager
    def one_more(self, tenant: str) -> Iterator[None]:
        """One, until the body has ended. Raises Overloaded where there are too many."""
        if self._held.total() >= self._most or self._held[tenant] >= self._most_of_tenant:
            raise Overloaded("too many answers are unread; read those that you have asked for", retry_after=UNKNOWN_S)
        self._held[tenant] += 1
        try:
            yield
        finally:
            self._held[tenant] -= 1
            self._held += Counter()  # forgets tenants that have none


class Place:
    """One generation's place. Its tenant is charged with what it spends here."""

    def __init__(self, admission: Admission, claim: Claim) -> None:
        self._admission = admission
        self._claim = claim
        self.since = admission.clock()  # when it was got
        self._held = True
        self._spent = 0.0
        self._said = 0

    def spend(self, *, read: int = 0, said: int = 0) -> None:
        """So many tokens of its prompt were read, or of its answer said."""
        self._spent += read + OUTPUT_WEIGHT * said
        self._said += said
        if self._admission.tokens is not None:
            self._admission.tokens.take(self._claim.tenant, read + said)

    @property
    def held(self) -> bool:
        """Whether it has it."""
        return self._held

    @property
    def claim(self) -> Claim:
        """What it was given for."""
        return self._claim

    async def again(self, refused: str) -> None:
        """Gives the place back, which a verifier did not have after all, and waits for another one before all others.

        Raises as `Admission.place`.
        """
        self._give_back()
        await self._take(Priority.RESUMED, refused)

    async def take_turn(self) -> None:
        """Waits for a place like others, after it was left. Raises as `Admission.place`."""
        await self._take(max(self._claim.priority, Priority.INTERACTIVE), "")

    async def _take(self, priority: Priority, refused: str) -> None:
        await self._admission.take(replace(self._claim, priority=priority), refused)  # which costs nothing more
        self._held, self.since = True, self._admission.clock()

    def leave(self) -> None:
        """Gives the place back, if it has one."""
        if self._held:
            if self._said:  # one that was only read again tells nothing
                self._admission.stays[self._claim.model].observe(self._admission.clock() - self.since)
            self._give_back()
            self._admission.dispatch()

    def _give_back(self) -> None:
        self._held = False
        unspent, self._claim = self._claim.tokens - self._spent, replace(self._claim, tokens=0.0)
        self._spent, self._said = 0.0, 0
        self._admission.give_back(self._claim, unspent)
