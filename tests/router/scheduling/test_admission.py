"""Admission: one for each place, the right one next, and a quick no for what cannot be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.config import RouterConfig
from outrider.errors import DeadlineExceeded, Moved, Overloaded
from outrider.limits import fair_queue, token_buckets
from outrider.limits.fair_queue import AdmissionTicket, FairQueue, QueueClass
from outrider.limits.rate_limits import ResidencyEma
from outrider.limits.token_buckets import TokenBuckets
from router.scheduling.admission import Admission, AdmissionSlot, AnswerLimit


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def claim(
    tenant: str = "a",
    *,
    priority: QueueClass = QueueClass.INTERACTIVE,
    tokens: float = 100,
    deadline: float | None = None,
) -> AdmissionTicket:
    return AdmissionTicket("model", tenant, priority, tokens, deadline)


class Front:
    """An admission with some places, and what it let in."""

    def __init__(self, places: int, **options: Any) -> None:
        self.places: int | None = places
        self.clock = Clock()
        self.jitter: Callable[[float, float], float] = min
        config = RouterConfig(models={"model": Path("/m")}, **options)
        self.admission = Admission(config, self._places, clock=self.clock, jitter=self._jitter)
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.leave: dict[str, asyncio.Event] = {}
        self.held: dict[str, AdmissionSlot] = {}

    def _jitter(self, low: float, high: float) -> float:
        return self.jitter(low, high)

    def _places(self, model: str) -> int | None:
        assert model in ("model", "other")
        return self.places

    def come(self, name: str, wanted: AdmissionTicket | None = None) -> asyncio.Task[None]:
        self.leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, wanted or claim()))
        return self.tasks[name]

    async def go(self, name: str) -> None:
        self.leave[name].set()
        await self.tasks[name]
        await turn()

    async def _stay(self, name: str, wanted: AdmissionTicket) -> None:
        self.admission.rates.count_call(wanted.tenant, "Generate")
        async with self.admission.slot(wanted) as place:
            self.held[name] = place
            self.inside.append(name)
            await self.leave[name].wait()


async def turn() -> None:
    """Return when every task that can go on has done so."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def front() -> AsyncIterator[Callable[..., Front]]:
    async with AsyncExitStack() as stack:

        @asynccontextmanager
        async def closing(made: Front) -> AsyncIterator[Front]:
            yield made
            for task in made.tasks.values():
                task.cancel()
            await asyncio.gather(*made.tasks.values(), return_exceptions=True)
            assert (made.admission.held, made.admission.waiting) == (0, 0)  # nothing leaked, whatever happened

        made: list[Front] = []

        def make(places: int, **options: Any) -> Front:
            made.append(Front(places, **options))
            return made[-1]

        yield make
        for one in made:
            await stack.enter_async_context(closing(one))


async def test_slots_are_given_in_order_of_arrival(front: Callable[..., Front]) -> None:
    door = front(2)
    for name in "1234":
        door.come(name)
        await turn()
    assert door.inside == ["1", "2"]
    await door.go("2")
    await door.go("1")
    assert door.inside == ["1", "2", "3", "4"]
    door.places = 3
    door.come("5")
    await turn()
    assert door.inside[-1] == "5"


async def test_resumed_requests_precede_interactive_ones_which_precede_batch_ones(front: Callable[..., Front]) -> None:
    door = front(1)
    door.come("first")
    await turn()
    for priority in reversed(QueueClass):
        door.come(priority.name, claim(priority=priority))
        await turn()
    for name in ("first", "RESUMED", "INTERACTIVE"):
        await door.go(name)
    assert door.inside == ["first", "RESUMED", "INTERACTIVE", "BATCH"]


def served(queue: FairQueue[str], count: int) -> list[str]:
    return [queue.pop(lambda _: True) or "" for _ in range(count)]


def test_tenants_share_by_tokens_and_not_by_requests() -> None:
    queue = FairQueue[str]()
    for number in range(30):
        queue.push(claim("large", tokens=300), f"large {number}")
        queue.push(claim("small", tokens=100), f"small {number}")
    first = served(queue, 24)
    assert sum(name.startswith("large") for name in first) == 6
    assert [name for name in first if name.startswith("small")] == [f"small {number}" for number in range(18)]


def test_a_tenant_with_many_requests_delays_no_other_and_none_saves_up_credit() -> None:
    queue = FairQueue[str]()
    for number in range(100):
        queue.push(claim("greedy"), f"greedy {number}")
    served(queue, 50)
    for number in range(10):
        queue.push(claim("late"), f"late {number}")
    both = served(queue, 10)
    assert sum(name.startswith("late") for name in both) == 5  # its share from now on, and nothing for the past


def test_tokens_that_were_not_generated_after_all_are_not_charged() -> None:
    queue = FairQueue[str]()
    for number in range(40):
        queue.push(claim("brief", tokens=1000), f"brief {number}")
        queue.push(claim("exact", tokens=100), f"exact {number}")
    order = []
    for _ in range(20):
        order += served(queue, 1)
        if order[-1].startswith("brief"):
            queue.charge("brief", -900.0)
    assert sum(name.startswith("brief") for name in order) == 10


async def test_a_full_queue_refuses_at_once_with_a_retry_time(front: Callable[..., Front]) -> None:
    door = front(1, queue=3, queue_per_tenant=2)
    door.come("1")
    await turn()
    door.held["1"].spend(output=1)
    door.clock.now += 4
    await door.go("1")  # a place is kept for four seconds
    for name in "234":
        door.come(name)
    await turn()
    with pytest.raises(Overloaded, match="2 of your requests wait") as caught:
        await door.come("5")
    assert caught.value.retry_after == pytest.approx(12)  # two before it, and its own turn
    door.come("6", claim("b"))
    await turn()
    with pytest.raises(Overloaded, match=r"3 requests wait \(queue\)") as caught:
        await door.come("7", claim("c"))
    assert caught.value.retry_after == pytest.approx(4 * 3)  # those of the others that stand at the front
    door.come("8", claim("c", priority=QueueClass.BATCH))  # it has a queue of its own
    await turn()
    assert door.admission.waiting == 4


async def test_a_request_that_would_miss_its_deadline_is_refused_and_not_queued(front: Callable[..., Front]) -> None:
    door = front(1)
    door.come("1")
    await turn()
    door.held["1"].spend(output=1)
    door.clock.now += 4
    await door.go("1")
    door.come("2")
    await turn()
    with pytest.raises(Overloaded, match="longer than the request may wait"):
        await asyncio.wait_for(door.come("3", claim(deadline=door.clock.now + 3)), 2)
    door.come("4", claim(deadline=door.clock.now + 5))
    await turn()
    assert door.admission.waiting == 1


async def test_an_expired_deadline_and_a_cancelled_caller_leave_the_queue_at_once(
    front: Callable[..., Front],
) -> None:
    door = front(1, queue_s=0.05)
    door.come("1")
    await turn()
    patient, gone = door.come("2"), door.come("3")
    await turn()
    gone.cancel()
    await turn()
    assert door.admission.waiting == 1
    with pytest.raises(Overloaded, match="no slot became free"):
        await patient
    late = door.come("4", claim(deadline=door.clock.now + 0.02))
    await turn()
    door.clock.now += 1
    with pytest.raises(DeadlineExceeded):
        await late


async def test_a_request_cancelled_at_its_turn_takes_no_slot(front: Callable[..., Front]) -> None:
    door = front(1)
    door.come("1")
    gone, next_one = door.come("2"), door.come("3")
    await turn()
    door.leave["1"].set()
    await asyncio.sleep(0)
    gone.cancel()
    await turn()
    assert not next_one.done()
    assert door.inside[-1] == "3"


async def test_a_tenant_keeps_within_its_concurrent_sessions(front: Callable[..., Front]) -> None:
    door = front(3, tenant_sessions=1)
    for name, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        door.come(name, claim(tenant))
        await turn()
    assert door.inside == ["a1", "b1"]
    await door.go("a1")
    assert door.inside == ["a1", "b1", "a2"]


async def test_each_slot_that_a_tenant_releases_is_available_to_it(front: Callable[..., Front]) -> None:
    door = front(9, tenant_sessions=2)
    for name in "1234":
        door.come(name)
        await turn()
    assert door.inside == ["1", "2"]
    await door.go("1")
    assert door.inside == ["1", "2", "3"]


async def test_a_request_refused_by_verifiers_waits_before_all_others(front: Callable[..., Front]) -> None:
    door = front(2)
    for name in "123":
        door.come(name)
        await turn()
    door.places = 1  # as a refusal taught
    back = asyncio.create_task(door.held["2"].retake(Overloaded("all slots are in use")))
    await turn()
    assert (back.done(), door.inside) == (False, ["1", "2"])
    await door.go("1")
    assert (back.done(), door.inside) == (True, ["1", "2"])
    await door.go("2")
    assert door.inside == ["1", "2", "3"]


async def test_no_request_waits_without_a_verifier_or_at_a_draining_router(
    front: Callable[..., Front],
) -> None:
    door = front(0)
    door.come("1")
    await turn()
    assert not door.inside
    door.places = None
    door.admission.dispatch()
    await turn()
    assert door.inside == ["1"]
    door.places = 0
    waiting = door.come("3")
    await turn()
    door.admission.close()
    for refused in (waiting, door.come("4")):
        with pytest.raises(Moved):
            await asyncio.wait_for(refused, 2)


async def test_rates_are_limited_by_tenant_with_bursts_and_debts() -> None:
    clock = Clock()
    buckets = TokenBuckets(2.0, 4.0, clock)
    for _ in range(4):
        assert buckets.wait_s("a", 1) == 0
        buckets.take("a", 1)
    assert buckets.wait_s("a", 1) == pytest.approx(0.5)
    assert buckets.wait_s("b", 1) == 0
    clock.now = 0.0
    assert TokenBuckets(2.0, 4.0, clock).wait_s("a", 4) == 0  # full at first, whatever the time is
    clock.now = 100.0
    buckets.take("a", 3)  # known only afterwards
    assert buckets.wait_s("a", 1) == pytest.approx(2.0)
    clock.now += 100
    assert buckets.wait_s("a", 4) == 0
    assert buckets.wait_s("a", 9) == 0  # it never holds more


async def test_a_tenant_over_its_rate_gets_a_retry_time(front: Callable[..., Front]) -> None:
    door = front(9, tenant_requests_per_s=1.0, tenant_tokens_per_min=60)
    door.come("1")
    await turn()
    with pytest.raises(Overloaded, match="tenant_requests_per_s") as caught:
        await door.come("2")
    assert caught.value.retry_after == pytest.approx(1.0)
    door.clock.now += 1
    door.held["1"].spend(prompt=30, output=60)
    with pytest.raises(Overloaded, match="tenant_tokens_per_min") as caught:
        await door.come("3")
    assert caught.value.retry_after == pytest.approx(31.0)
    door.come("4", claim("b"))
    await turn()
    assert door.inside == ["1", "4"]


def test_the_rate_of_free_slots_follows_from_their_residency() -> None:
    stay = ResidencyEma()
    assert stay.wait_s(0, 4) is None
    stay.observe(8.0)
    assert stay.wait_s(0, 4) == pytest.approx(2.0)
    assert stay.wait_s(3, 4) == pytest.approx(8.0)


def test_a_tenants_small_request_does_not_wait_behind_all_its_large_ones() -> None:
    queue = FairQueue[str]()
    for number in range(10):
        queue.push(claim(tokens=1000), f"much {number}")
    queue.push(claim(tokens=10), "little")
    assert queue.count_ahead(claim(tokens=10)) == 1
    assert queue.count_ahead(claim(tokens=1000)) == 11
    assert served(queue, 2) == ["little", "much 0"]
    queue.push(claim(tokens=10), "little 2")  # the next one neither
    assert served(queue, 2) == ["little 2", "much 1"]


def test_a_tenants_equal_requests_keep_their_order_despite_refunds() -> None:
    queue = FairQueue[str]()
    for number in range(4):
        queue.push(claim(tokens=2000), f"first {number}")
    served(queue, 4)
    queue.push(claim(tokens=2000), "mine")
    queue.charge("a", -4 * 1900)  # they ended long before their limits
    for number in range(10):
        queue.push(claim(tokens=2000), f"later {number}")
    assert served(queue, 2) == ["mine", "later 0"]


def test_a_tenants_large_request_is_not_passed_for_ever() -> None:
    queue = FairQueue[str]()
    queue.push(claim(tokens=1000), "much")
    passed = 0
    while True:
        queue.push(claim(tokens=50), "little")
        if served(queue, 1) == ["much"]:
            break
        passed += 1
    assert passed == 38  # it and one that passes share alike: by about twice as many tokens as it asks for itself


async def problem(door: Front, name: str, wanted: AdmissionTicket) -> tuple[str, float]:
    """The error text and the retry time of a request that is refused."""
    with pytest.raises(Overloaded) as caught:
        await door.come(name, wanted)
    return str(caught.value), caught.value.retry_after


async def known_stay(door: Front, seconds: float) -> None:
    """One request comes, has a token generated and leaves after `seconds`."""
    door.come("measured", claim("measured"))
    await turn()
    door.held["measured"].spend(output=1)
    door.clock.now += seconds
    await door.go("measured")


async def test_a_refusal_names_the_full_limit_the_reason_and_the_retry_time(front: Callable[..., Front]) -> None:
    door = front(1, queue=2, queue_per_tenant=1)
    for name, tenant in (("1", "a"), ("2", "a")):
        door.come(name, claim(tenant))
        await turn()
    with pytest.raises(Overloaded) as caught:
        await door.admission.take(claim(), "all slots are in use")
    assert str(caught.value) == (
        "all slots are in use; no slot is free and 1 of your requests wait (queue_per_tenant); retry in 1.0 s"
    )
    assert caught.value.retry_after == 1.0  # nothing was measured yet
    door.come("3", claim("b"))
    await turn()
    with pytest.raises(Overloaded) as caught:
        await door.admission.take(claim("c"), "all slots are in use")
    assert str(caught.value) == "all slots are in use; no slot is free and 2 requests wait (queue); retry in 1.0 s"
    assert await problem(door, "4", claim("c")) == ("no slot is free and 2 requests wait (queue); retry in 1.0 s", 1.0)


async def test_a_request_waits_for_a_slot_that_is_expected_just_in_time(front: Callable[..., Front]) -> None:
    door = front(2, max_sessions=1)  # of two places it may use one
    await known_stay(door, 4.0)
    door.come("1")
    await turn()
    in_time = door.come("2", claim(deadline=door.clock.now + 4))
    await turn()
    assert not in_time.done()
    with pytest.raises(Overloaded) as caught:
        await door.admission.take(claim(deadline=door.clock.now + 7.5), "all slots are in use")
    assert str(caught.value) == (
        "all slots are in use; a slot is expected in 8.0 s, longer than the request may wait; retry in 8.0 s"
    )
    door.places = None  # no verifier serves it; as many places as there may be at all
    assert (await problem(door, "3", claim(deadline=door.clock.now + 7.5)))[1] == 8.0


@pytest.mark.parametrize(("stay", "after"), [(0.01, 0.1), (5.0, 5.0), (100.0, 30.0)])
async def test_retry_times_are_neither_too_short_nor_too_long_and_are_spread(
    front: Callable[..., Front], stay: float, after: float
) -> None:
    door = front(1, queue=0)
    await known_stay(door, stay)
    door.come("1")
    await turn()
    assert (await problem(door, "2", claim()))[1] == after
    spread: list[tuple[float, float]] = []
    door.jitter = lambda low, high: spread.append((low, high)) or high
    assert (await problem(door, "3", claim()))[1] == 1.5 * after
    assert spread == [(1.0, 1.5)]


async def test_a_request_that_waited_in_vain_gets_its_waiting_time_or_deadline_error(
    front: Callable[..., Front],
) -> None:
    door = front(1, queue_s=0.05)
    door.come("1")
    await turn()
    assert await problem(door, "2", claim()) == ("no slot became free within 0.1 s; retry in 1.0 s", 1.0)
    late = door.come("3", claim(deadline=door.clock.now + 0.01))
    await turn()
    door.clock.now += 0.01
    with pytest.raises(DeadlineExceeded) as caught:
        await late
    assert str(caught.value) == "the deadline passed while the request waited for a slot"
    passed = door.come("4", claim(deadline=door.clock.now - 1))
    with pytest.raises(DeadlineExceeded):
        await passed
    with pytest.raises(Overloaded, match=r"within 0\.1 s"):  # not by the deadline, which is later
        await door.come("5", claim(deadline=door.clock.now + 9))
    await door.go("1")
    await known_stay(door, 0.04)
    door.come("6")
    await turn()
    assert (await problem(door, "7", claim()))[1] == 0.1  # the shortest retry time of all


async def test_a_draining_router_refuses_and_advises_to_resume_at_another(
    front: Callable[..., Front],
) -> None:
    door = front(0)
    waiting = [door.come(str(number)) for number in range(2)]
    await turn()
    door.admission.close()
    for refused in (*waiting, door.come("late")):
        with pytest.raises(Moved) as caught:
            await refused
        assert str(caught.value) == "this router is shutting down; resume at another router"


async def test_a_tenant_over_its_rate_gets_the_name_of_the_rate_and_the_retry_time(front: Callable[..., Front]) -> None:
    door = front(9, tenant_requests_per_s=0.5)
    door.come("1")  # a whole one, be the rate below one a second
    await turn()
    message = "this tenant is over its rate (tenant_requests_per_s); retry in 2.0 s"
    assert await problem(door, "2", claim()) == (message, 2.0)
    door = front(99, tenant_requests_per_s=20.0)
    for number in range(20):
        door.come(str(number))
    await turn()
    assert len(door.inside) == 20
    assert (await problem(door, "21", claim()))[1] == 0.1  # no sooner
    door = front(9, tenant_tokens_per_min=60)
    for number in range(3):  # the prompt and the answer count, when they are known
        door.come(str(number))
    await turn()
    door.held["0"].spend(prompt=59)
    door.come("3")
    await turn()
    assert "3" in door.inside
    door.held["0"].spend(output=1)
    message = "this tenant is over its rate (tenant_tokens_per_min); retry in 1.0 s"
    assert await problem(door, "4", claim()) == (message, 1.0)


async def test_queued_requests_are_counted_by_priority(front: Callable[..., Front]) -> None:
    door = front(0)
    for name, priority in enumerate((QueueClass.INTERACTIVE, QueueClass.BATCH, QueueClass.BATCH)):
        door.come(str(name), claim(priority=priority))
    await turn()
    assert door.admission.depths() == {"resumed": 0.0, "interactive": 1.0, "batch": 2.0}
    assert door.admission.waiting == 3


async def test_a_slot_is_given_up_only_for_requests_that_can_use_it(front: Callable[..., Front]) -> None:
    door = front(1, max_sessions=2)
    mine, other = claim(), replace(claim("b"), model="other")
    door.come("1", mine)
    await turn()
    assert not door.admission.has_waiter_for(mine)
    door.come("2", claim("b"))
    await turn()
    assert door.admission.has_waiter_for(mine)
    assert not door.admission.has_waiter_for(other)  # its place is of no use to those that want this model
    door.come("3", other)
    await turn()
    assert door.inside == ["1", "3"]
    assert door.admission.has_waiter_for(other)  # now all that there may be are taken


async def test_a_slot_is_not_given_up_for_a_tenant_at_its_limit(front: Callable[..., Front]) -> None:
    door = front(2, tenant_sessions=1)
    for name, tenant in (("a", "a"), ("b", "b"), ("another a", "a")):
        door.come(name, claim(tenant))
        await turn()
    assert not door.admission.has_waiter_for(claim("b"))
    assert door.admission.has_waiter_for(claim("a"))


async def test_a_tenant_is_charged_once_for_prompt_tokens_and_twice_for_generated_ones(
    front: Callable[..., Front],
) -> None:
    door = front(1)
    door.come("1")
    await turn()
    accounts = door.admission.queues["model"].served
    assert accounts == {"a": 100}
    door.held["1"].spend(prompt=7, output=3)
    door.held["1"].spend(output=5)
    await door.go("1")
    assert accounts == {"a": 7 + 2 * 8}
    assert not door.admission._tenants
    gone = door.come("2", claim("b", tokens=50))
    await turn()
    gone.cancel()
    await turn()
    assert accounts == {"a": 23, "b": pytest.approx(accounts["b"])}
    assert door.admission.held == 0


async def test_a_request_cancelled_at_its_turn_pays_nothing(front: Callable[..., Front]) -> None:
    door = front(1)
    door.come("1")
    await turn()
    gone = door.come("2", claim("b", tokens=70))
    await turn()
    accounts = door.admission.queues["model"].served
    before = accounts["b"]
    door.leave["1"].set()
    await asyncio.sleep(0)
    assert accounts["b"] == before + 70  # it was given the place
    gone.cancel()
    await turn()
    assert accounts["b"] == before
    assert (door.admission.held, door.admission.waiting) == (0, 0)


async def test_a_retaken_slot_costs_nothing_more_and_its_residency_begins_again(
    front: Callable[..., Front],
) -> None:
    door = front(1)
    door.come("1")
    await turn()
    place, accounts = door.held["1"], door.admission.queues["model"].served
    place.spend(prompt=10, output=5)
    door.clock.now += 50
    await place.retake("all slots are in use")
    assert (place.held, place.since, accounts["a"]) == (True, door.clock.now, 20)
    place.spend(output=1)
    door.clock.now += 3
    place.release()
    assert accounts["a"] == 22
    assert door.admission.residency["model"].wait_s(0, 1) == 3.0
    assert not place.held
    place.release()  # it has none
    assert door.admission.held == 0


async def test_a_request_refused_by_a_verifier_precedes_others_even_of_a_heavy_tenant(
    front: Callable[..., Front],
) -> None:
    door = front(1)
    door.come("1")
    await turn()
    door.come("2", claim("b"))
    await turn()
    assert door.admission.waiting == 1
    door.held["1"].spend(output=5000)
    async with asyncio.timeout(1):
        await door.held["1"].retake("all slots are in use")
    assert door.inside == ["1"]


async def test_a_request_that_waits_again_in_vain_gets_the_reason(front: Callable[..., Front]) -> None:
    door = front(1, queue=0)
    door.come("1")
    await turn()
    door.places = 0
    with pytest.raises(Overloaded, match=r"^all slots are in use; no slot is free and 0 requests wait"):
        await door.held["1"].retake("all slots are in use")
    with pytest.raises(Overloaded, match=r"^no slot is free and 0 requests wait"):
        await door.held["1"].rejoin_queue()


async def test_a_handed_on_request_takes_a_slot_at_once_and_releases_it(front: Callable[..., Front]) -> None:
    door = front(0)
    async with door.admission.slot(claim(tokens=0), handed_on=True) as place:
        assert (door.admission.held, place.held) == (1, True)
    assert (door.admission.held, place.held) == (0, False)


async def test_a_residency_is_known_once_a_token_was_generated(front: Callable[..., Front]) -> None:
    door = front(2)
    for name in "12":
        door.come(name)
    await turn()
    door.held["1"].spend(output=5)
    await door.held["1"].retake("all slots are in use")
    door.held["1"].spend(prompt=9)  # it has been alone since it has the place
    door.clock.now += 7
    door.held["1"].release()
    assert door.admission.residency["model"].wait_s(0, 1) is None
    door.held["2"].spend(output=1)
    door.held["2"].spend(prompt=9)
    door.held["2"].release()
    assert door.admission.residency["model"].wait_s(0, 1) == 7.0


async def test_a_slot_without_a_generated_token_does_not_count_for_the_residency(
    front: Callable[..., Front],
) -> None:
    door = front(1)
    door.come("1")
    await turn()
    door.held["1"].spend(prompt=10)
    door.clock.now += 50
    await door.go("1")
    assert door.admission.residency["model"].wait_s(0, 1) is None


@pytest.mark.parametrize(
    ("own", "before"),
    [(QueueClass.RESUMED, ["waiting", "resumed"]), (QueueClass.BATCH, ["waiting", "resumed", "batch"])],
)
async def test_a_request_that_left_its_slot_rejoins_the_queue(
    front: Callable[..., Front], own: QueueClass, before: list[str]
) -> None:
    door = front(1)
    door.come("1", claim("left", priority=own))
    await turn()
    place = door.held["1"]
    door.come("waiting", claim("b"))
    await turn()
    place.release()
    await turn()
    for name, priority in (("batch", QueueClass.BATCH), ("resumed", QueueClass.RESUMED)):
        door.come(name, claim(name, priority=priority))
        await turn()
    back = asyncio.create_task(place.rejoin_queue())
    await turn()
    for name in before:
        assert (door.inside[-1], back.done()) == (name, False)
        await door.go(name)
    assert (back.done(), place.held) == (True, True)
    place.release()


def test_the_queue_position_counts_classes_tenants_and_token_counts() -> None:
    queue = FairQueue[str]()
    for number in range(3):
        queue.push(claim("a"), f"a {number}")
    queue.push(claim("b"), "b")
    queue.push(claim("c", priority=QueueClass.BATCH), "c")
    assert queue.count_ahead(claim("a")) == 3 + 1
    assert queue.count_ahead(claim("a", tokens=99)) == 0 + 1
    assert queue.count_ahead(claim("b")) == 1 + 2
    assert queue.count_ahead(claim("new")) == 1 + 1
    assert queue.count_ahead(claim("new", priority=QueueClass.BATCH)) == 4 + 1
    assert queue.count_ahead(claim("new", priority=QueueClass.RESUMED)) == 0
    assert (len(queue), queue.waiting(QueueClass.INTERACTIVE), queue.waiting(QueueClass.INTERACTIVE, "a")) == (5, 4, 3)
    assert queue.waiting(QueueClass.BATCH, "a") == 0


def test_an_ineligible_request_is_skipped_and_keeps_its_turn() -> None:
    queue = FairQueue[str]()
    queue.push(claim("a"), "a")
    assert queue.pop(lambda one: one.tenant != "a") is None
    assert not queue.has_any(lambda one: one.tenant != "a")
    assert queue.has_any(lambda one: one.tenant == "a")
    queue.push(claim("b"), "b")
    queue.push(claim("c", priority=QueueClass.BATCH), "c")
    assert queue.pop(lambda one: one.priority is QueueClass.BATCH) == "c"
    assert queue.pop(lambda one: one.tenant == "b") == "b"
    assert queue.pop(lambda _: True) == "a"
    assert queue.pop(lambda _: True) is None


def test_a_removed_request_leaves_the_others_in_order() -> None:
    queue = FairQueue[str]()
    for name in ("first", "second", "third"):
        queue.push(claim(), name)
    queue.remove(claim(), "second")
    assert served(queue, 2) == ["first", "third"]
    queue.push(claim(), "last")
    queue.remove(claim(), "last")
    assert (len(queue), queue.pop(lambda _: True)) == (0, None)
    assert not queue.has_any(lambda _: True)


def test_a_returning_tenants_account_is_raised_to_the_lowest_waiting_or_last_served() -> None:
    queue = FairQueue[str]()
    for tenant in "ab":
        queue.push(claim(tenant), tenant)
    queue.charge("a", 500.0)
    queue.charge("b", 300.0)
    queue.push(claim("new"), "new")
    assert queue.served == {"a": 500.0, "b": 300.0, "new": 300.0}
    queue.push(claim("new"), "more")  # it waits already
    queue.push(claim("a", priority=QueueClass.BATCH), "more")
    assert queue.served == {"a": 500.0, "b": 300.0, "new": 300.0}
    while queue:
        queue.pop(lambda _: True)
    queue.push(claim("later"), "later")
    assert queue.served["later"] == 600.0  # as a, when its second one was taken
    queue.push(claim("a"), "a")
    assert queue.served["a"] == 700.0  # more than the floor
    queue.charge("never seen", 5.0)
    assert queue.served["never seen"] == 605.0


def test_the_idle_tenants_with_the_least_usage_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_TENANTS", 3)
    queue = FairQueue[str]()
    queue.push(claim("waiting"), "waiting")
    for tenant, tokens in (("a", 30.0), ("b", 10.0), ("c", 20.0)):
        queue.charge(tenant, tokens)
    assert set(queue.served) == {"waiting", "a", "c"}
    for number in range(3):
        queue.push(claim(str(number)), str(number))
    queue.charge("0", 1.0)
    assert {"waiting", "0", "1", "2"} <= set(queue.served)


def test_the_mean_residency_follows_slowly_and_zero_slots_count_as_one() -> None:
    stay = ResidencyEma()
    stay.observe(8.0)
    stay.observe(18.0)
    assert stay.wait_s(0, 1) == pytest.approx(9.0)
    assert stay.wait_s(0, 0) == pytest.approx(9.0)


def kept(buckets: TokenBuckets) -> set[str]:
    """The keys whose buckets are kept. A bucket that is forgotten is full, as one is whose key is new."""
    return {*buckets._levels}


def test_a_refund_never_overfills_a_bucket_and_full_buckets_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_buckets, "MAX_BUCKETS", 2)
    clock = Clock()
    buckets = TokenBuckets(2.0, 4.0, clock)
    buckets.take("a", -9)
    assert buckets.wait_s("a", 4) == 0
    buckets.take("b", 1)
    assert kept(buckets) == {"a", "b"}  # as many as there may be
    buckets.take("b", -1)
    buckets.take("a", 4)
    assert buckets.wait_s("a", 1) == pytest.approx(0.5)
    buckets.take("b", 4)
    clock.now += 1
    assert buckets.wait_s("a", 4) == pytest.approx(1.0)
    buckets.take("a", 1)
    clock.now += 1
    assert kept(buckets) == {"a", "b"}
    buckets.take("c", 0)  # one too many, and that of b is full by now, as is the new one
    assert kept(buckets) == {"a"}
    assert buckets.wait_s("a", 4) == pytest.approx(0.5)


async def test_a_slot_is_released_once_however_often_it_is_left(front: Callable[..., Front]) -> None:
    """A generation that makes room for others leaves it, and may be broken off before it has another one."""
    admission = front(1).admission
    async with admission.slot(claim()) as place:
        place.release()
        assert (admission.held, place.held) == (0, False)
        async with admission.slot(claim()):
            place.release()
            assert admission.held == 1
    assert admission.held == 0


async def test_a_tenant_is_charged_for_the_tokens_spent_in_its_slot(front: Callable[..., Front]) -> None:
    door = front(1)
    for tenant, expected, output in (("brief", 1000.0, 5), ("exact", 100.0, 50)):
        async with door.admission.slot(claim(tenant, tokens=expected)) as place:
            place.spend(output=output)
    door.come("present", claim("other"))
    await turn()
    for tenant in ("new", "exact", "brief"):
        door.come(tenant, claim(tenant))
    await turn()
    await door.go("present")
    await door.go("new")
    assert door.inside == ["present", "new", "brief"]


def test_finished_answers_free_their_capacity() -> None:
    answers = AnswerLimit(RouterConfig(models={"model": Path("/m")}, max_sessions=1, queue=1))
    for _ in range(9):
        with answers.hold("a"), answers.hold("a"):
            with pytest.raises(Overloaded), answers.hold("a"):
                pass
            with answers.hold("b"), answers.hold("b"), pytest.raises(Overloaded), answers.hold("c"):
                pass
