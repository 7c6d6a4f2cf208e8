"""Admission: one request for each slot, in a fair order, and quick refusals."""

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


def ticket(
    tenant: str = "a",
    *,
    priority: QueueClass = QueueClass.INTERACTIVE,
    tokens: float = 100,
    deadline: float | None = None,
) -> AdmissionTicket:
    return AdmissionTicket("model", tenant, priority, tokens, deadline)


class AdmissionRig:
    """An admission with some slots, and the requests that it admitted."""

    def __init__(self, slots: int, **options: Any) -> None:
        self.slots: int | None = slots
        self.clock = Clock()
        self.jitter: Callable[[float, float], float] = min
        config = RouterConfig(models={"model": Path("/m")}, **options)
        self.admission = Admission(config, self._slots, clock=self.clock, jitter=self._jitter)
        self.admitted: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.ending: dict[str, asyncio.Event] = {}
        self.held: dict[str, AdmissionSlot] = {}

    def _jitter(self, low: float, high: float) -> float:
        return self.jitter(low, high)

    def _slots(self, model: str) -> int | None:
        assert model in ("model", "other")
        return self.slots

    def request(self, name: str, wanted: AdmissionTicket | None = None) -> asyncio.Task[None]:
        self.ending[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, wanted or ticket()))
        return self.tasks[name]

    async def finish(self, name: str) -> None:
        self.ending[name].set()
        await self.tasks[name]
        await turn()

    async def _stay(self, name: str, wanted: AdmissionTicket) -> None:
        self.admission.rates.count_call(wanted.tenant, "Generate")
        async with self.admission.slot(wanted) as slot:
            self.held[name] = slot
            self.admitted.append(name)
            await self.ending[name].wait()


async def turn() -> None:
    """Return when every task that can go on has done so."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
async def make_rig() -> AsyncIterator[Callable[..., AdmissionRig]]:
    async with AsyncExitStack() as stack:

        @asynccontextmanager
        async def closing(made: AdmissionRig) -> AsyncIterator[AdmissionRig]:
            yield made
            for task in made.tasks.values():
                task.cancel()
            await asyncio.gather(*made.tasks.values(), return_exceptions=True)
            assert (made.admission.held, made.admission.waiting) == (0, 0)  # nothing leaked, whatever happened

        made: list[AdmissionRig] = []

        def make(slots: int, **options: Any) -> AdmissionRig:
            made.append(AdmissionRig(slots, **options))
            return made[-1]

        yield make
        for one in made:
            await stack.enter_async_context(closing(one))


async def test_slots_are_given_in_order_of_arrival(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(2)
    for name in "1234":
        rig.request(name)
        await turn()
    assert rig.admitted == ["1", "2"]
    await rig.finish("2")
    await rig.finish("1")
    assert rig.admitted == ["1", "2", "3", "4"]
    rig.slots = 3
    rig.request("5")
    await turn()
    assert rig.admitted[-1] == "5"


async def test_resumed_requests_precede_interactive_ones_which_precede_batch_ones(
    make_rig: Callable[..., AdmissionRig],
) -> None:
    rig = make_rig(1)
    rig.request("first")
    await turn()
    for priority in reversed(QueueClass):
        rig.request(priority.name, ticket(priority=priority))
        await turn()
    for name in ("first", "RESUMED", "INTERACTIVE"):
        await rig.finish(name)
    assert rig.admitted == ["first", "RESUMED", "INTERACTIVE", "BATCH"]


def served(queue: FairQueue[str], count: int) -> list[str]:
    return [queue.pop(lambda _: True) or "" for _ in range(count)]


def test_tenants_share_by_tokens_and_not_by_requests() -> None:
    queue = FairQueue[str]()
    for number in range(30):
        queue.push(ticket("large", tokens=300), f"large {number}")
        queue.push(ticket("small", tokens=100), f"small {number}")
    first = served(queue, 24)
    assert sum(name.startswith("large") for name in first) == 6
    assert [name for name in first if name.startswith("small")] == [f"small {number}" for number in range(18)]


def test_a_tenant_with_many_requests_delays_no_other_and_none_saves_up_credit() -> None:
    queue = FairQueue[str]()
    for number in range(100):
        queue.push(ticket("greedy"), f"greedy {number}")
    served(queue, 50)
    for number in range(10):
        queue.push(ticket("late"), f"late {number}")
    both = served(queue, 10)
    assert sum(name.startswith("late") for name in both) == 5  # its share from now on, and nothing for the past


def test_tokens_that_were_not_generated_after_all_are_not_charged() -> None:
    queue = FairQueue[str]()
    for number in range(40):
        queue.push(ticket("brief", tokens=1000), f"brief {number}")
        queue.push(ticket("exact", tokens=100), f"exact {number}")
    order = []
    for _ in range(20):
        order += served(queue, 1)
        if order[-1].startswith("brief"):
            queue.charge("brief", -900.0)
    assert sum(name.startswith("brief") for name in order) == 10


async def test_a_full_queue_refuses_at_once_with_a_retry_time(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(1, queue=3, queue_per_tenant=2)
    rig.request("1")
    await turn()
    rig.held["1"].spend(output=1)
    rig.clock.now += 4
    await rig.finish("1")  # a slot is kept for four seconds
    for name in "234":
        rig.request(name)
    await turn()
    with pytest.raises(Overloaded, match="2 of your requests wait") as caught:
        await rig.request("5")
    assert caught.value.retry_after == pytest.approx(12)  # two before it, and its own turn
    rig.request("6", ticket("b"))
    await turn()
    with pytest.raises(Overloaded, match=r"3 requests wait \(queue\)") as caught:
        await rig.request("7", ticket("c"))
    assert caught.value.retry_after == pytest.approx(4 * 3)  # those of the others that stand at the front
    rig.request("8", ticket("c", priority=QueueClass.BATCH))  # it has a queue of its own
    await turn()
    assert rig.admission.waiting == 4


async def test_a_request_that_would_miss_its_deadline_is_refused_and_not_queued(
    make_rig: Callable[..., AdmissionRig],
) -> None:
    rig = make_rig(1)
    rig.request("1")
    await turn()
    rig.held["1"].spend(output=1)
    rig.clock.now += 4
    await rig.finish("1")
    rig.request("2")
    await turn()
    with pytest.raises(Overloaded, match="longer than the request may wait"):
        await asyncio.wait_for(rig.request("3", ticket(deadline=rig.clock.now + 3)), 2)
    rig.request("4", ticket(deadline=rig.clock.now + 5))
    await turn()
    assert rig.admission.waiting == 1


async def test_an_expired_deadline_and_a_cancelled_caller_leave_the_queue_at_once(
    make_rig: Callable[..., AdmissionRig],
) -> None:
    rig = make_rig(1, queue_s=0.05)
    rig.request("1")
    await turn()
    patient, cancelled = rig.request("2"), rig.request("3")
    await turn()
    cancelled.cancel()
    await turn()
    assert rig.admission.waiting == 1
    with pytest.raises(Overloaded, match="no slot became free"):
        await patient
    late = rig.request("4", ticket(deadline=rig.clock.now + 0.02))
    await turn()
    rig.clock.now += 1
    with pytest.raises(DeadlineExceeded):
        await late


async def test_a_request_cancelled_at_its_turn_takes_no_slot(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(1)
    rig.request("1")
    cancelled, next_one = rig.request("2"), rig.request("3")
    await turn()
    rig.ending["1"].set()
    await asyncio.sleep(0)
    cancelled.cancel()
    await turn()
    assert not next_one.done()
    assert rig.admitted[-1] == "3"


async def test_a_tenant_keeps_within_its_concurrent_sessions(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(3, tenant_sessions=1)
    for name, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        rig.request(name, ticket(tenant))
        await turn()
    assert rig.admitted == ["a1", "b1"]
    await rig.finish("a1")
    assert rig.admitted == ["a1", "b1", "a2"]


async def test_each_slot_that_a_tenant_releases_is_available_to_it(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(9, tenant_sessions=2)
    for name in "1234":
        rig.request(name)
        await turn()
    assert rig.admitted == ["1", "2"]
    await rig.finish("1")
    assert rig.admitted == ["1", "2", "3"]


async def test_a_request_refused_by_verifiers_waits_before_all_others(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(2)
    for name in "123":
        rig.request(name)
        await turn()
    rig.slots = 1  # as a refusal taught
    back = asyncio.create_task(rig.held["2"].retake(Overloaded("all slots are in use")))
    await turn()
    assert (back.done(), rig.admitted) == (False, ["1", "2"])
    await rig.finish("1")
    assert (back.done(), rig.admitted) == (True, ["1", "2"])
    await rig.finish("2")
    assert rig.admitted == ["1", "2", "3"]


async def test_no_request_waits_without_a_verifier_or_at_a_draining_router(
    make_rig: Callable[..., AdmissionRig],
) -> None:
    rig = make_rig(0)
    rig.request("1")
    await turn()
    assert not rig.admitted
    rig.slots = None
    rig.admission.dispatch()
    await turn()
    assert rig.admitted == ["1"]
    rig.slots = 0
    waiting = rig.request("3")
    await turn()
    rig.admission.close()
    for refused in (waiting, rig.request("4")):
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


async def test_a_tenant_over_its_rate_gets_a_retry_time(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(9, tenant_requests_per_s=1.0, tenant_tokens_per_min=60)
    rig.request("1")
    await turn()
    with pytest.raises(Overloaded, match="tenant_requests_per_s") as caught:
        await rig.request("2")
    assert caught.value.retry_after == pytest.approx(1.0)
    rig.clock.now += 1
    rig.held["1"].spend(prompt=30, output=60)
    with pytest.raises(Overloaded, match="tenant_tokens_per_min") as caught:
        await rig.request("3")
    assert caught.value.retry_after == pytest.approx(31.0)
    rig.request("4", ticket("b"))
    await turn()
    assert rig.admitted == ["1", "4"]


def test_the_rate_of_free_slots_follows_from_their_residency() -> None:
    residency_ema = ResidencyEma()
    assert residency_ema.wait_s(0, 4) is None
    residency_ema.observe(8.0)
    assert residency_ema.wait_s(0, 4) == pytest.approx(2.0)
    assert residency_ema.wait_s(3, 4) == pytest.approx(8.0)


def test_a_tenants_small_request_does_not_wait_behind_all_its_large_ones() -> None:
    queue = FairQueue[str]()
    for number in range(10):
        queue.push(ticket(tokens=1000), f"much {number}")
    queue.push(ticket(tokens=10), "little")
    assert queue.count_ahead(ticket(tokens=10)) == 1
    assert queue.count_ahead(ticket(tokens=1000)) == 11
    assert served(queue, 2) == ["little", "much 0"]
    queue.push(ticket(tokens=10), "little 2")  # the next one neither
    assert served(queue, 2) == ["little 2", "much 1"]


def test_a_tenants_equal_requests_keep_their_order_despite_refunds() -> None:
    queue = FairQueue[str]()
    for number in range(4):
        queue.push(ticket(tokens=2000), f"first {number}")
    served(queue, 4)
    queue.push(ticket(tokens=2000), "mine")
    queue.charge("a", -4 * 1900)  # they ended long before their limits
    for number in range(10):
        queue.push(ticket(tokens=2000), f"later {number}")
    assert served(queue, 2) == ["mine", "later 0"]


def test_a_tenants_large_request_is_not_passed_for_ever() -> None:
    queue = FairQueue[str]()
    queue.push(ticket(tokens=1000), "much")
    passed = 0
    while True:
        queue.push(ticket(tokens=50), "little")
        if served(queue, 1) == ["much"]:
            break
        passed += 1
    assert passed == 38  # it and one that passes share alike: by about twice as many tokens as it asks for itself


async def problem(rig: AdmissionRig, name: str, wanted: AdmissionTicket) -> tuple[str, float]:
    """The error text and the retry time of a request that is refused."""
    with pytest.raises(Overloaded) as caught:
        await rig.request(name, wanted)
    return str(caught.value), caught.value.retry_after


async def known_residency(rig: AdmissionRig, seconds: float) -> None:
    """One request comes, has a token generated and leaves after `seconds`."""
    rig.request("measured", ticket("measured"))
    await turn()
    rig.held["measured"].spend(output=1)
    rig.clock.now += seconds
    await rig.finish("measured")


async def test_a_refusal_names_the_full_limit_the_reason_and_the_retry_time(
    make_rig: Callable[..., AdmissionRig],
) -> None:
    rig = make_rig(1, queue=2, queue_per_tenant=1)
    for name, tenant in (("1", "a"), ("2", "a")):
        rig.request(name, ticket(tenant))
        await turn()
    with pytest.raises(Overloaded) as caught:
        await rig.admission.take(ticket(), "all slots are in use")
    assert str(caught.value) == (
        "all slots are in use; no slot is free and 1 of your requests wait (queue_per_tenant); retry in 1.0 s"
    )
    assert caught.value.retry_after == 1.0  # nothing was measured yet
    rig.request("3", ticket("b"))
    await turn()
    with pytest.raises(Overloaded) as caught:
        await rig.admission.take(ticket("c"), "all slots are in use")
    assert str(caught.value) == "all slots are in use; no slot is free and 2 requests wait (queue); retry in 1.0 s"
    assert await problem(rig, "4", ticket("c")) == ("no slot is free and 2 requests wait (queue); retry in 1.0 s", 1.0)


async def test_a_request_waits_for_a_slot_that_is_expected_just_in_time(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(2, max_sessions=1)  # of two slots it may use one
    await known_residency(rig, 4.0)
    rig.request("1")
    await turn()
    in_time = rig.request("2", ticket(deadline=rig.clock.now + 4))
    await turn()
    assert not in_time.done()
    with pytest.raises(Overloaded) as caught:
        await rig.admission.take(ticket(deadline=rig.clock.now + 7.5), "all slots are in use")
    assert str(caught.value) == (
        "all slots are in use; a slot is expected in 8.0 s, longer than the request may wait; retry in 8.0 s"
    )
    rig.slots = None  # no verifier serves it; as many slots as there may be at all
    assert (await problem(rig, "3", ticket(deadline=rig.clock.now + 7.5)))[1] == 8.0


@pytest.mark.parametrize(("residency_s", "after"), [(0.01, 0.1), (5.0, 5.0), (100.0, 30.0)])
async def test_retry_times_are_neither_too_short_nor_too_long_and_are_spread(
    make_rig: Callable[..., AdmissionRig], residency_s: float, after: float
) -> None:
    rig = make_rig(1, queue=0)
    await known_residency(rig, residency_s)
    rig.request("1")
    await turn()
    assert (await problem(rig, "2", ticket()))[1] == after
    spread: list[tuple[float, float]] = []
    rig.jitter = lambda low, high: spread.append((low, high)) or high
    assert (await problem(rig, "3", ticket()))[1] == 1.5 * after
    assert spread == [(1.0, 1.5)]


async def test_a_request_that_waited_in_vain_gets_its_waiting_time_or_deadline_error(
    make_rig: Callable[..., AdmissionRig],
) -> None:
    rig = make_rig(1, queue_s=0.05)
    rig.request("1")
    await turn()
    assert await problem(rig, "2", ticket()) == ("no slot became free within 0.1 s; retry in 1.0 s", 1.0)
    late = rig.request("3", ticket(deadline=rig.clock.now + 0.01))
    await turn()
    rig.clock.now += 0.01
    with pytest.raises(DeadlineExceeded) as caught:
        await late
    assert str(caught.value) == "the deadline passed while the request waited for a slot"
    passed = rig.request("4", ticket(deadline=rig.clock.now - 1))
    with pytest.raises(DeadlineExceeded):
        await passed
    with pytest.raises(Overloaded, match=r"within 0\.1 s"):  # not by the deadline, which is later
        await rig.request("5", ticket(deadline=rig.clock.now + 9))
    await rig.finish("1")
    await known_residency(rig, 0.04)
    rig.request("6")
    await turn()
    assert (await problem(rig, "7", ticket()))[1] == 0.1  # the shortest retry time of all


async def test_a_draining_router_refuses_and_advises_to_resume_at_another(
    make_rig: Callable[..., AdmissionRig],
) -> None:
    rig = make_rig(0)
    waiting = [rig.request(str(number)) for number in range(2)]
    await turn()
    rig.admission.close()
    for refused in (*waiting, rig.request("late")):
        with pytest.raises(Moved) as caught:
            await refused
        assert str(caught.value) == "this router is shutting down; resume at another router"


async def test_a_tenant_over_its_rate_gets_the_name_of_the_rate_and_the_retry_time(
    make_rig: Callable[..., AdmissionRig],
) -> None:
    rig = make_rig(9, tenant_requests_per_s=0.5)
    rig.request("1")  # a whole one, be the rate below one a second
    await turn()
    message = "this tenant is over its rate (tenant_requests_per_s); retry in 2.0 s"
    assert await problem(rig, "2", ticket()) == (message, 2.0)
    rig = make_rig(99, tenant_requests_per_s=20.0)
    for number in range(20):
        rig.request(str(number))
    await turn()
    assert len(rig.admitted) == 20
    assert (await problem(rig, "21", ticket()))[1] == 0.1  # no sooner
    rig = make_rig(9, tenant_tokens_per_min=60)
    for number in range(3):  # the prompt and the answer count, when they are known
        rig.request(str(number))
    await turn()
    rig.held["0"].spend(prompt=59)
    rig.request("3")
    await turn()
    assert "3" in rig.admitted
    rig.held["0"].spend(output=1)
    message = "this tenant is over its rate (tenant_tokens_per_min); retry in 1.0 s"
    assert await problem(rig, "4", ticket()) == (message, 1.0)


async def test_queued_requests_are_counted_by_priority(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(0)
    for name, priority in enumerate((QueueClass.INTERACTIVE, QueueClass.BATCH, QueueClass.BATCH)):
        rig.request(str(name), ticket(priority=priority))
    await turn()
    assert rig.admission.depths() == {"resumed": 0.0, "interactive": 1.0, "batch": 2.0}
    assert rig.admission.waiting == 3


async def test_a_slot_is_given_up_only_for_requests_that_can_use_it(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(1, max_sessions=2)
    mine, other = ticket(), replace(ticket("b"), model="other")
    rig.request("1", mine)
    await turn()
    assert not rig.admission.has_waiter_for(mine)
    rig.request("2", ticket("b"))
    await turn()
    assert rig.admission.has_waiter_for(mine)
    assert not rig.admission.has_waiter_for(other)  # its slot is of no use to those that want this model
    rig.request("3", other)
    await turn()
    assert rig.admitted == ["1", "3"]
    assert rig.admission.has_waiter_for(other)  # now all that there may be are taken


async def test_a_slot_is_not_given_up_for_a_tenant_at_its_limit(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(2, tenant_sessions=1)
    for name, tenant in (("a", "a"), ("b", "b"), ("another a", "a")):
        rig.request(name, ticket(tenant))
        await turn()
    assert not rig.admission.has_waiter_for(ticket("b"))
    assert rig.admission.has_waiter_for(ticket("a"))


async def test_a_tenant_is_charged_once_for_prompt_tokens_and_twice_for_generated_ones(
    make_rig: Callable[..., AdmissionRig],
) -> None:
    rig = make_rig(1)
    rig.request("1")
    await turn()
    accounts = rig.admission.queues["model"].served
    assert accounts == {"a": 100}
    rig.held["1"].spend(prompt=7, output=3)
    rig.held["1"].spend(output=5)
    await rig.finish("1")
    assert accounts == {"a": 7 + 2 * 8}
    assert not rig.admission._tenants
    cancelled = rig.request("2", ticket("b", tokens=50))
    await turn()
    cancelled.cancel()
    await turn()
    assert accounts == {"a": 23, "b": pytest.approx(accounts["b"])}
    assert rig.admission.held == 0


async def test_a_request_cancelled_at_its_turn_pays_nothing(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(1)
    rig.request("1")
    await turn()
    cancelled = rig.request("2", ticket("b", tokens=70))
    await turn()
    accounts = rig.admission.queues["model"].served
    before = accounts["b"]
    rig.ending["1"].set()
    await asyncio.sleep(0)
    assert accounts["b"] == before + 70  # it was given the slot
    cancelled.cancel()
    await turn()
    assert accounts["b"] == before
    assert (rig.admission.held, rig.admission.waiting) == (0, 0)


async def test_a_retaken_slot_costs_nothing_more_and_its_residency_begins_again(
    make_rig: Callable[..., AdmissionRig],
) -> None:
    rig = make_rig(1)
    rig.request("1")
    await turn()
    slot, accounts = rig.held["1"], rig.admission.queues["model"].served
    slot.spend(prompt=10, output=5)
    rig.clock.now += 50
    await slot.retake("all slots are in use")
    assert (slot.held, slot.since, accounts["a"]) == (True, rig.clock.now, 20)
    slot.spend(output=1)
    rig.clock.now += 3
    slot.release()
    assert accounts["a"] == 22
    assert rig.admission.residency["model"].wait_s(0, 1) == 3.0
    assert not slot.held
    slot.release()  # it has none
    assert rig.admission.held == 0


async def test_a_request_refused_by_a_verifier_precedes_others_even_of_a_heavy_tenant(
    make_rig: Callable[..., AdmissionRig],
) -> None:
    rig = make_rig(1)
    rig.request("1")
    await turn()
    rig.request("2", ticket("b"))
    await turn()
    assert rig.admission.waiting == 1
    rig.held["1"].spend(output=5000)
    async with asyncio.timeout(1):
        await rig.held["1"].retake("all slots are in use")
    assert rig.admitted == ["1"]


async def test_a_request_that_waits_again_in_vain_gets_the_reason(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(1, queue=0)
    rig.request("1")
    await turn()
    rig.slots = 0
    with pytest.raises(Overloaded, match=r"^all slots are in use; no slot is free and 0 requests wait"):
        await rig.held["1"].retake("all slots are in use")
    with pytest.raises(Overloaded, match=r"^no slot is free and 0 requests wait"):
        await rig.held["1"].rejoin_queue()


async def test_a_handed_on_request_takes_a_slot_at_once_and_releases_it(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(0)
    async with rig.admission.slot(ticket(tokens=0), handed_on=True) as slot:
        assert (rig.admission.held, slot.held) == (1, True)
    assert (rig.admission.held, slot.held) == (0, False)


async def test_a_residency_is_known_once_a_token_was_generated(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(2)
    for name in "12":
        rig.request(name)
    await turn()
    rig.held["1"].spend(output=5)
    await rig.held["1"].retake("all slots are in use")
    rig.held["1"].spend(prompt=9)  # it has been alone since it has the slot
    rig.clock.now += 7
    rig.held["1"].release()
    assert rig.admission.residency["model"].wait_s(0, 1) is None
    rig.held["2"].spend(output=1)
    rig.held["2"].spend(prompt=9)
    rig.held["2"].release()
    assert rig.admission.residency["model"].wait_s(0, 1) == 7.0


async def test_a_slot_without_a_generated_token_does_not_count_for_the_residency(
    make_rig: Callable[..., AdmissionRig],
) -> None:
    rig = make_rig(1)
    rig.request("1")
    await turn()
    rig.held["1"].spend(prompt=10)
    rig.clock.now += 50
    await rig.finish("1")
    assert rig.admission.residency["model"].wait_s(0, 1) is None


@pytest.mark.parametrize(
    ("own", "before"),
    [(QueueClass.RESUMED, ["waiting", "resumed"]), (QueueClass.BATCH, ["waiting", "resumed", "batch"])],
)
async def test_a_request_that_left_its_slot_rejoins_the_queue(
    make_rig: Callable[..., AdmissionRig], own: QueueClass, before: list[str]
) -> None:
    rig = make_rig(1)
    rig.request("1", ticket("left", priority=own))
    await turn()
    slot = rig.held["1"]
    rig.request("waiting", ticket("b"))
    await turn()
    slot.release()
    await turn()
    for name, priority in (("batch", QueueClass.BATCH), ("resumed", QueueClass.RESUMED)):
        rig.request(name, ticket(name, priority=priority))
        await turn()
    back = asyncio.create_task(slot.rejoin_queue())
    await turn()
    for name in before:
        assert (rig.admitted[-1], back.done()) == (name, False)
        await rig.finish(name)
    assert (back.done(), slot.held) == (True, True)
    slot.release()


def test_the_queue_position_counts_classes_tenants_and_token_counts() -> None:
    queue = FairQueue[str]()
    for number in range(3):
        queue.push(ticket("a"), f"a {number}")
    queue.push(ticket("b"), "b")
    queue.push(ticket("c", priority=QueueClass.BATCH), "c")
    assert queue.count_ahead(ticket("a")) == 3 + 1
    assert queue.count_ahead(ticket("a", tokens=99)) == 0 + 1
    assert queue.count_ahead(ticket("b")) == 1 + 2
    assert queue.count_ahead(ticket("new")) == 1 + 1
    assert queue.count_ahead(ticket("new", priority=QueueClass.BATCH)) == 4 + 1
    assert queue.count_ahead(ticket("new", priority=QueueClass.RESUMED)) == 0
    assert (len(queue), queue.waiting(QueueClass.INTERACTIVE), queue.waiting(QueueClass.INTERACTIVE, "a")) == (5, 4, 3)
    assert queue.waiting(QueueClass.BATCH, "a") == 0


def test_an_ineligible_request_is_skipped_and_keeps_its_turn() -> None:
    queue = FairQueue[str]()
    queue.push(ticket("a"), "a")
    assert queue.pop(lambda one: one.tenant != "a") is None
    assert not queue.has_any(lambda one: one.tenant != "a")
    assert queue.has_any(lambda one: one.tenant == "a")
    queue.push(ticket("b"), "b")
    queue.push(ticket("c", priority=QueueClass.BATCH), "c")
    assert queue.pop(lambda one: one.priority is QueueClass.BATCH) == "c"
    assert queue.pop(lambda one: one.tenant == "b") == "b"
    assert queue.pop(lambda _: True) == "a"
    assert queue.pop(lambda _: True) is None


def test_a_removed_request_leaves_the_others_in_order() -> None:
    queue = FairQueue[str]()
    for name in ("first", "second", "third"):
        queue.push(ticket(), name)
    queue.remove(ticket(), "second")
    assert served(queue, 2) == ["first", "third"]
    queue.push(ticket(), "last")
    queue.remove(ticket(), "last")
    assert (len(queue), queue.pop(lambda _: True)) == (0, None)
    assert not queue.has_any(lambda _: True)


def test_a_returning_tenants_account_is_raised_to_the_lowest_waiting_or_last_served() -> None:
    queue = FairQueue[str]()
    for tenant in "ab":
        queue.push(ticket(tenant), tenant)
    queue.charge("a", 500.0)
    queue.charge("b", 300.0)
    queue.push(ticket("new"), "new")
    assert queue.served == {"a": 500.0, "b": 300.0, "new": 300.0}
    queue.push(ticket("new"), "more")  # it waits already
    queue.push(ticket("a", priority=QueueClass.BATCH), "more")
    assert queue.served == {"a": 500.0, "b": 300.0, "new": 300.0}
    while queue:
        queue.pop(lambda _: True)
    queue.push(ticket("later"), "later")
    assert queue.served["later"] == 600.0  # as a, when its second one was taken
    queue.push(ticket("a"), "a")
    assert queue.served["a"] == 700.0  # more than the floor
    queue.charge("never seen", 5.0)
    assert queue.served["never seen"] == 605.0


def test_the_idle_tenants_with_the_least_usage_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "MAX_TENANTS", 3)
    queue = FairQueue[str]()
    queue.push(ticket("waiting"), "waiting")
    for tenant, tokens in (("a", 30.0), ("b", 10.0), ("c", 20.0)):
        queue.charge(tenant, tokens)
    assert set(queue.served) == {"waiting", "a", "c"}
    for number in range(3):
        queue.push(ticket(str(number)), str(number))
    queue.charge("0", 1.0)
    assert {"waiting", "0", "1", "2"} <= set(queue.served)


def test_the_mean_residency_follows_slowly_and_zero_slots_count_as_one() -> None:
    residency_ema = ResidencyEma()
    residency_ema.observe(8.0)
    residency_ema.observe(18.0)
    assert residency_ema.wait_s(0, 1) == pytest.approx(9.0)
    assert residency_ema.wait_s(0, 0) == pytest.approx(9.0)


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


async def test_a_slot_is_released_once_however_often_it_is_left(make_rig: Callable[..., AdmissionRig]) -> None:
    """A generation that makes room for others leaves it, and may be broken off before it has another one."""
    admission = make_rig(1).admission
    async with admission.slot(ticket()) as slot:
        slot.release()
        assert (admission.held, slot.held) == (0, False)
        async with admission.slot(ticket()):
            slot.release()
            assert admission.held == 1
    assert admission.held == 0


async def test_a_tenant_is_charged_for_the_tokens_spent_in_its_slot(make_rig: Callable[..., AdmissionRig]) -> None:
    rig = make_rig(1)
    for tenant, expected, output in (("brief", 1000.0, 5), ("exact", 100.0, 50)):
        async with rig.admission.slot(ticket(tenant, tokens=expected)) as slot:
            slot.spend(output=output)
    rig.request("present", ticket("other"))
    await turn()
    for tenant in ("new", "exact", "brief"):
        rig.request(tenant, ticket(tenant))
    await turn()
    await rig.finish("present")
    await rig.finish("new")
    assert rig.admitted == ["present", "new", "brief"]


def test_finished_answers_free_their_capacity() -> None:
    answers = AnswerLimit(RouterConfig(models={"model": Path("/m")}, max_sessions=1, queue=1))
    for _ in range(9):
        with answers.hold("a"), answers.hold("a"):
            with pytest.raises(Overloaded), answers.hold("a"):
                pass
            with answers.hold("b"), answers.hold("b"), pytest.raises(Overloaded), answers.hold("c"):
                pass
