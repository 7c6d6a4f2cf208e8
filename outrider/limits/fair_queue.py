"""The order of queued requests: priority classes first, then fair shares between tenants by tokens, then arrival and
expected cost."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Generic, NamedTuple, TypeVar

ItemT = TypeVar("ItemT")

MAX_TENANTS = 4096  # tenants whose counters are kept; the lowest counter is dropped first


class QueueClass(IntEnum):
    """Priority classes; lower ones go first."""

    RESUMED = 0  # the generation has begun, and its client waits in the middle of the text
    INTERACTIVE = 1
    BATCH = 2


@dataclass(frozen=True, slots=True)
class AdmissionTicket:
    """What a request asks of admission."""

    model: str
    tenant: str
    priority: QueueClass
    tokens: float  # the expected cost to its tenant
    deadline: float | None = None  # by the queue's clock; None: no deadline


class _Waiting(NamedTuple, Generic[ItemT]):
    """One queued request of a tenant; the smallest goes first."""

    finish: float  # finish tag: the line's virtual time on arrival plus the request's tokens
    number: int  # arrival number
    ticket: AdmissionTicket
    item: ItemT


class _Line(Generic[ItemT]):
    """Queued requests of one class and tenant, by their finish tags."""

    def __init__(self) -> None:
        self.waiting: list[_Waiting[ItemT]] = []
        self._virtual = 0.0  # tokens that each would have been served by now if all shared alike

    def __len__(self) -> int:
        return len(self.waiting)

    def finish(self, ticket: AdmissionTicket) -> float:
        """Return the finish tag of a request that arrives now."""
        return self._virtual + ticket.tokens

    def push(self, ticket: AdmissionTicket, number: int, item: ItemT) -> None:
        insort(self.waiting, _Waiting(self.finish(ticket), number, ticket, item))

    def remove(self, item: ItemT) -> None:
        del self.waiting[next(index for index, one in enumerate(self.waiting) if one.item is item)]

    def serve(self, ticket: AdmissionTicket) -> None:
        """Advance virtual time for a request that is about to be taken. A later refund changes nothing, or later
        requests would pass earlier ones."""
        self._virtual += ticket.tokens / len(self.waiting)


class FairQueue(Generic[ItemT]):
    """The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (arXiv 2401.00588).

    Each tenant has a counter of the tokens that it was served, and the tenant with the lowest counter is next. The
    counter of a tenant that comes back after a pause is lifted to the lowest of those that wait, so that no tenant
    saves up credit (their algorithm 2). A generation is charged with its expected cost when it is taken (their section
    on length prediction), and `charge` corrects the charge when it has ended.

    Within a tenant requests go in the order in which they would end if all that wait shared alike (finish tags; Demers
    et al., "Analysis and Simulation of a Fair Queueing Algorithm", SIGCOMM 1989): a small request does not wait behind
    many large ones, a large one gets its share, and requests of equal size go in the order of their arrival.
    """

    def __init__(self) -> None:
        self._classes: dict[QueueClass, dict[str, _Line[ItemT]]] = {kind: {} for kind in QueueClass}
        self._arrivals = count()
        self.served: dict[str, float] = {}  # tokens, by tenant
        self._floor = 0.0  # the counter of the tenant that was served last

    def __len__(self) -> int:
        return sum(self.waiting(kind) for kind in QueueClass)

    def waiting(self, priority: QueueClass, tenant: str | None = None) -> int:
        """Return how many requests of a class wait, of one tenant or of all."""
        tenants = self._classes[priority]
        return sum(map(len, tenants.values())) if tenant is None else len(tenants.get(tenant, ()))

    def has_any(self, eligible: Callable[[AdmissionTicket], bool]) -> bool:
        """Return whether a request waits whose ticket is eligible."""
        lines = (line for tenants in self._classes.values() for line in tenants.values())
        return any(eligible(line.waiting[0].ticket) for line in lines)

    def count_ahead(self, ticket: AdmissionTicket) -> int:
        """Return how many requests would go before another of that class and tenant if all tenants have equal costs."""
        first = sum(self.waiting(kind) for kind in QueueClass if kind < ticket.priority)
        line = self._classes[ticket.priority].get(ticket.tenant)
        turn = 0 if line is None else sum(one.finish <= line.finish(ticket) for one in line.waiting)
        others = (len(line) for name, line in self._classes[ticket.priority].items() if name != ticket.tenant)
        return first + turn + sum(min(length, turn + 1) for length in others)

    def push(self, ticket: AdmissionTicket, item: ItemT) -> None:
        """Add a request."""
        if not any(ticket.tenant in tenants for tenants in self._classes.values()):
            present = {tenant for tenants in self._classes.values() for tenant in tenants}
            floor = min((self.served[tenant] for tenant in present), default=self._floor)
            self.served[ticket.tenant] = max(self.served.get(ticket.tenant, 0.0), floor)
        line = self._classes[ticket.priority].setdefault(ticket.tenant, _Line())
        line.push(ticket, next(self._arrivals), item)

    def pop(self, eligible: Callable[[AdmissionTicket], bool]) -> ItemT | None:
        """Take the next request and charge its tenant; None when no request waits whose ticket is `eligible`."""
        for tenants in self._classes.values():
            able = [tenant for tenant, line in tenants.items() if eligible(line.waiting[0].ticket)]
            if able:
                tenant = min(able, key=self.served.__getitem__)
                _, _, ticket, item = tenants[tenant].waiting[0]
                tenants[tenant].serve(ticket)
                self.remove(ticket, item)
                self._floor = self.served[tenant]
                self.charge(tenant, ticket.tokens)
                return item
        return None

    def remove(self, ticket: AdmissionTicket, item: ItemT) -> None:
        """Remove a request that does not wait any more."""
        tenants = self._classes[ticket.priority]
        tenants[ticket.tenant].remove(item)
        if not tenants[ticket.tenant]:
            del tenants[ticket.tenant]

    def charge(self, tenant: str, tokens: float) -> None:
        """Add tokens to a tenant's counter; a negative number corrects an estimate that was too high."""
        self.served[tenant] = self.served.get(tenant, self._floor) + tokens
        if len(self.served) > MAX_TENANTS:
            idle = self.served.keys() - {name for tenants in self._classes.values() for name in tenants}
            if idle:
                del self.served[min(idle, key=self.served.__getitem__)]
