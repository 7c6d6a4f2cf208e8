"""Who is next: priority classes first, then fair between tenants by tokens, then by arrival and what is asked for."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Generic, NamedTuple, TypeVar

ItemT = TypeVar("ItemT")

REMEMBERED = 4096  # tenants whose counters are kept; those that had least go first, for they owe nothing


class Priority(IntEnum):
    """Lower ones go first."""

    RESUMED = 0  # it has begun, and somebody waits in the middle of its text
    INTERACTIVE = 1
    BATCH = 2


@dataclass(frozen=True, slots=True)
class Claim:
    """What wants a place."""

    model: str
    tenant: str
    priority: Priority
    tokens: float  # what it is expected to cost its tenant
    deadline: float | None = None  # by the queue's clock; None: none


class _Waiting(NamedTuple, Generic[ItemT]):
    """One in a tenant's line; the first of the line is the smallest."""

    finish: float  # the line's virtual time when it came, and its own tokens
    number: int  # of its arrival
    claim: Claim
    item: ItemT


class _Line(Generic[ItemT]):
    """Those of one class and tenant that wait, by their finish tags."""

    def __init__(self) -> None:
        self.waiting: list[_Waiting[ItemT]] = []
        self._virtual = 0.0  # tokens that each would have been served by now if all shared alike

    def __len__(self) -> int:
        return len(self.waiting)

    def finish(self, claim: Claim) -> float:
        """The tag of one that comes now."""
        return self._virtual + claim.tokens

    def push(self, claim: Claim, number: int, item: ItemT) -> None:
        insort(self.waiting, _Waiting(self.finish(claim), number, claim, item))

    def remove(self, item: ItemT) -> None:
        del self.waiting[next(index for index, one in enumerate(self.waiting) if one.item is item)]

    def serve(self, claim: Claim) -> None:
        """One is about to be taken. What it gives back later changes nothing: later ones would pass earlier ones."""
        self._virtual += claim.tokens / len(self.waiting)


class FairQueue(Generic[ItemT]):
    """The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (arXiv 2401.00588).

    Each tenant has a counter of the tokens that it was served, and the tenant with the lowest is next. Who comes back
    after a pause is lifted to the lowest of those that wait, so that nobody saves up credit (their algorithm 2). A
    generation is charged with what it is expected to cost when it is taken (their section on length prediction) and
    `charge` corrects that when it has ended.

    Within a tenant claims go in the order in which they would end if all that wait shared alike (finish tags; Demers et
    al., "Analysis and Simulation of a Fair Queueing Algorithm", SIGCOMM 1989): one that asks for little does not wait
    behind many that ask for much, one that asks for much has its share, and those that ask for as much as each other go
    in the order of their arrival.
    """

    def __init__(self) -> None:
        self._classes: dict[Priority, dict[str, _Line[ItemT]]] = {kind: {} for kind in Priority}
        self._arrivals = count()
        self._served: dict[str, float] = {}  # tokens by tenant
        self._floor = 0.0  # the counter of who was taken last

    def __len__(self) -> int:
        return sum(self.waiting(kind) for kind in Priority)

    def waiting(self, priority: Priority, tenant: str | None = None) -> int:
        """How many of a class wait, of one tenant or of all."""
        tenants = self._classes[priority]
        return sum(map(len, tenants.values())) if tenant is None else len(tenants.get(tenant, ()))

    def any(self, eligible: Callable[[Claim], bool]) -> bool:
        """Whether somebody waits whose claim is eligible."""
        lines = (line for tenants in self._classes.values() for line in tenants.values())
        return any(eligible(line.waiting[0].claim) for line in lines)

    def ahead(self, claim: Claim) -> int:
        """How many would go before a further one of that class and tenant if tenants cost the same."""
        first = sum(self.waiting(kind) for kind in Priority if kind < claim.priority)
        line = self._classes[claim.priority].get(claim.tenant)
        turn = 0 if line is None else sum(one.finish <= line.finish(claim) for one in line.waiting)
        others = (len(line) for name, line in self._classes[claim.priority].items() if name != claim.tenant)
        return first + turn + sum(min(length, turn + 1) for length in others)

    def push(self, claim: Claim, item: ItemT) -> None:
        """Adds one."""
        if not any(claim.tenant in tenants for tenants in self._classes.values()):
            present = {tenant for tenants in self._classes.values() for tenant in tenants}
            floor = min((self._served[tenant] for tenant in present), default=self._floor)
            self._served[claim.tenant] = max(self._served.get(claim.tenant, 0.0), floor)
        line = self._classes[claim.priority].setdefault(claim.tenant, _Line())
        line.push(claim, next(self._arrivals), item)

    def pop(self, eligible: Callable[[Claim], bool]) -> ItemT | None:
        """Takes the next one, and charges its tenant; None when nobody waits whose claim is `eligible` now."""
        for tenants in self._classes.values():
            able = [tenant for tenant, line in tenants.items() if eligible(line.waiting[0].claim)]
            if able:
                tenant = min(able, key=self._served.__getitem__)
                _, _, claim, item = tenants[tenant].waiting[0]
                tenants[tenant].serve(claim)
                self.remove(claim, item)
                self._floor = self._served[tenant]
                self.charge(tenant, claim.tokens)
                return item
        return None

    def remove(self, claim: Claim, item: ItemT) -> None:
        """Takes one out that does not wait any more."""
        tenants = self._classes[claim.priority]
        tenants[claim.tenant].remove(item)
        if not tenants[claim.tenant]:
            del tenants[claim.tenant]

    def charge(self, tenant: str, tokens: float) -> None:
        """Puts tokens on a tenant's account; negative ones correct an expectation that was too high."""
        self._served[tenant] = self._served.get(tenant, self._floor) + tokens
        if len(self._served) > REMEMBERED:
            idle = self._served.keys() - {name for tenants in self._classes.values() for name in tenants}
            if idle:
                del self._served[min(idle, key=self._served.__getitem__)]
