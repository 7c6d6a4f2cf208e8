"""Admission: a generation gets a slot at once, waits for one in a bounded queue, or is refused at once."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from outrider.config import RouterConfig
from outrider.errors import DeadlineExceeded, Moved, Overloaded
from outrider.limits.concurrency_limit import ConcurrencyLimit
from outrider.limits.fair_queue import AdmissionTicket, FairQueue, QueueClass
from outrider.limits.rate_limits import MIN_RETRY_S, CallRates, ResidencyEma

OUTPUT_WEIGHT = 2.0  # a token of the response costs about as much as two of the prompt, as in arXiv 2401.00588
MAX_RETRY_S = 30.0  # at most, for a refusal's retry_after
DEFAULT_RETRY_S = 1.0  # retry_after while no residency was measured
SHUTTING_DOWN = "this router is shutting down; resume at another router"


@dataclass(eq=False, slots=True)
class _Waiter:
    """A queued request."""

    ticket: AdmissionTicket
    granted: asyncio.Future[None]


class Admission:
    """Decides how many generations run at once, and which queued request is next.

    `capacity(model)` returns how many of this router's sessions the model's verifiers can hold, as far as is known;
    None if no verifier serves the model: then requests are admitted at once and fail as they begin. Call `dispatch`
    when the capacity may have changed.
    """

    def __init__(
        self,
        config: RouterConfig,
        capacity: Callable[[str], int | None],
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.clock = clock
        self.residency: defaultdict[str, ResidencyEma] = defaultdict(ResidencyEma)  # by model
        self._config = config
        self._capacity = capacity
        self._jitter = jitter
        self.queues: dict[str, FairQueue[_Waiter]] = {}  # by model
        self._held: Counter[str] = Counter()  # slots in use, by model
        self._tenants: Counter[str] = Counter()  # slots in use, by tenant
        self._closed = False
        self.rates = CallRates(config, clock)

    @property
    def closed(self) -> bool:
        """Whether this router shuts down."""
        return self._closed

    @property
    def held(self) -> int:
        """Slots in use."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """Queued requests."""
        return sum(map(len, self.queues.values()))

    def has_waiter_for(self, ticket: AdmissionTicket) -> bool:
        """Return whether a queued request could use the slot of this ticket."""
        limit = self._config.tenant_sessions
        full = self.held >= self._config.max_sessions  # then a free slot of any model helps every queue

        def could_use(other: AdmissionTicket) -> bool:
            return self._eligible(other) or (limit is not None and other.tenant == ticket.tenant)

        queues = self.queues.items()
        return any(queue.has_any(could_use) for model, queue in queues if full or model == ticket.model)

    def depths(self) -> dict[str, float]:
        """Return the number of queued requests by priority. May be called in another thread."""
        queues = tuple(self.queues.values())
        return {kind.name.lower(): float(sum(queue.waiting(kind) for queue in queues)) for kind in QueueClass}

    @asynccontextmanager
    async def slot(self, ticket: AdmissionTicket, *, handed_on: bool = False) -> AsyncIterator[AdmissionSlot]:
        """Yield a slot that is held while the body runs. `handed_on`: the slot of a generation that is being taken over
        is used.

        Raises Overloaded at once if the queue is full or the deadline would pass, and later if the wait was too long;
        DeadlineExceeded when the deadline has passed; Moved when `close` is called.
        """
        if handed_on:
            self._grant(ticket)
        else:
            await self.take(ticket)
        slot = AdmissionSlot(self, ticket)
        try:
            yield slot
        finally:
            slot.release()

    def dispatch(self) -> None:
        """Grant free slots to the next queued requests."""
        for model, queue in self.queues.items():
            while self._has_room(model) and (waiter := queue.pop(self._eligible)) is not None:
                self._grant(waiter.ticket)
                waiter.granted.set_result(None)

    def close(self) -> None:
        """Refuse all requests with Moved from now on, also the queued ones."""
        self._closed = True
        for queue in self.queues.values():
            while (waiter := queue.pop(lambda ticket: True)) is not None:
                waiter.granted.set_exception(Moved(SHUTTING_DOWN))

    async def take(self, ticket: AdmissionTicket, refused: str = "") -> None:
        """Wait for a slot. `refused`: the verifier's refusal, if one gave the last slot back."""
        if self._closed:
            raise Moved(SHUTTING_DOWN)
        queue = self.queues.setdefault(ticket.model, FairQueue())
        ahead = queue.count_ahead(ticket)
        waiter = _Waiter(ticket, asyncio.get_running_loop().create_future())
        queue.push(ticket, waiter)
        self.dispatch()
        if waiter.granted.done():
            return
        try:
            limit = self._max_wait_s(ticket, queue, ahead, refused)
            try:
                async with asyncio.timeout(limit):
                    await asyncio.shield(waiter.granted)
            except TimeoutError:
                if ticket.deadline is not None and self.clock() >= ticket.deadline:
                    raise DeadlineExceeded("the deadline passed while the request waited for a slot") from None
                raise self._overloaded(ticket, f"no slot became free within {limit:.1f} s", ahead) from None
        except BaseException:
            if not waiter.granted.done():
                queue.remove(ticket, waiter)
            elif not waiter.granted.exception():  # granted in the very moment of the cancellation
                self.give_back(ticket, ticket.tokens)
                self.dispatch()
            raise

    def _max_wait_s(self, ticket: AdmissionTicket, queue: FairQueue[_Waiter], ahead: int, refused: str) -> float:
        """Return the seconds that the request may wait. Raises Overloaded if it may not wait or would wait in vain."""
        config = self._config
        before = f"{refused}; " if refused else ""
        if queue.waiting(ticket.priority) > config.queue:
            raise self._overloaded(ticket, f"{before}no slot is free and {config.queue} requests wait (queue)", ahead)
        if queue.waiting(ticket.priority, ticket.tenant) > config.queue_per_tenant:
            waiting_of_tenant = f"{config.queue_per_tenant} of your requests wait (queue_per_tenant)"
            raise self._overloaded(ticket, f"{before}no slot is free and {waiting_of_tenant}", ahead)
        limit = config.queue_s
        if ticket.deadline is not None:
            limit = min(limit, ticket.deadline - self.clock())
        expected = self.residency[ticket.model].wait_s(ahead, self._max_held(ticket.model))
        if expected is not None and expected > limit:
            raise self._overloaded(
                ticket, f"{before}a slot is expected in {expected:.1f} s, longer than the request may wait", ahead
            )
        return max(0.0, limit)

    def _overloaded(self, ticket: AdmissionTicket, problem: str, ahead: int) -> Overloaded:
        """Return the error with the time after which to retry. The time is randomized, so that clients refused together
        do not retry together."""
        expected = self.residency[ticket.model].wait_s(ahead, self._max_held(ticket.model))
        after = DEFAULT_RETRY_S if expected is None else min(max(expected, MIN_RETRY_S), MAX_RETRY_S)
        after *= self._jitter(1.0, 1.5)
        return Overloaded(f"{problem}; retry in {after:.1f} s", retry_after=after)

    def _max_held(self, model: str) -> int:
        """How many slots this router's sessions of a model may use at once."""
        capacity = self._capacity(model)
        return self._config.max_sessions if capacity is None else min(capacity, self._config.max_sessions)

    def _has_room(self, model: str) -> bool:
        """Return whether one more generation of the model may be admitted. Granted slots count before they are used."""
        if self.held >= self._config.max_sessions:
            return False
        capacity = self._capacity(model)
        return capacity is None or self._held[model] < capacity

    def _eligible(self, ticket: AdmissionTicket) -> bool:
        limit = self._config.tenant_sessions
        return limit is None or self._tenants[ticket.tenant] < limit

    def _grant(self, ticket: AdmissionTicket) -> None:
        self._held[ticket.model] += 1
        self._tenants[ticket.tenant] += 1

    def give_back(self, ticket: AdmissionTicket, unspent: float) -> None:
        """Return a slot, and refund what its tenant was charged beyond what it spent. Call `dispatch` next."""
        self._held[ticket.model] -= 1
        self._tenants[ticket.tenant] -= 1
        self._tenants += Counter()  # drops tenants without slots
        self.queues.setdefault(ticket.model, FairQueue()).charge(ticket.tenant, -unspent)


class AnswerLimit(ConcurrencyLimit):
    """Bounds how many responses are in memory at once: of generations with slots, and of those without because their
    clients do not read or because they have ended and are read again."""

    def __init__(self, config: RouterConfig) -> None:
        problem = "too many responses are unread; read those that you requested"
        of_tenant = config.max_sessions + config.queue
        super().__init__(problem, 2 * of_tenant, of_key=of_tenant, retry_s=DEFAULT_RETRY_S)


class FollowerLimit(ConcurrencyLimit):
    """Bounds how many requests wait for the answers of equal ones, as the queue does for those that wait for slots."""

    def __init__(self, config: RouterConfig) -> None:
        problem = "too many requests wait for the answers of others with their idempotency keys"
        super().__init__(problem, config.queue, of_key=config.queue_per_tenant, retry_s=DEFAULT_RETRY_S)


class AdmissionSlot:
    """One generation's slot. Its tenant is charged with the tokens that the generation spends in it."""

    def __init__(self, admission: Admission, ticket: AdmissionTicket) -> None:
        self._admission = admission
        self.ticket = ticket  # with which the slot was requested
        self.since = admission.clock()  # when the slot was granted
        self.held = True
        self._spent = 0.0
        self._output_tokens = 0

    def spend(self, *, prompt: int = 0, output: int = 0) -> None:
        """Charge tokens of the prompt that were read, and tokens of the response."""
        self._spent += prompt + OUTPUT_WEIGHT * output
        self._output_tokens += output
        if (tokens := self._admission.rates.tokens) is not None:
            tokens.take(self.ticket.tenant, prompt + output)

    async def retake(self, refused: str) -> None:
        """Wait for a slot before all other requests, in place of one that a verifier refused or that was released.

        Raises as `Admission.slot`.
        """
        if self.held:
            self._give_back()
        await self._take(QueueClass.RESUMED, refused)

    async def rejoin_queue(self) -> None:
        """Wait for a slot like other requests, after this one was released. Raises as `Admission.slot`."""
        await self._take(max(self.ticket.priority, QueueClass.INTERACTIVE), "")

    async def _take(self, priority: QueueClass, refused: str) -> None:
        await self._admission.take(replace(self.ticket, priority=priority), refused)  # the tenant is not charged again
        self.held, self.since = True, self._admission.clock()

    def release(self) -> None:
        """Give the slot back, if it is held."""
        if self.held:
            if self._output_tokens:  # a generation without output is no measurement
                self._admission.residency[self.ticket.model].observe(self._admission.clock() - self.since)
            self._give_back()
            self._admission.dispatch()

    def _give_back(self) -> None:
        self.held = False
        unspent, self.ticket = self.ticket.tokens - self._spent, replace(self.ticket, tokens=0.0)
        self._spent, self._output_tokens = 0.0, 0
        self._admission.give_back(self.ticket, unspent)
