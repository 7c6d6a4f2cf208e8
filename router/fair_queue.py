"""Who is next: priority classes first, then fair between tenants by tokens, then first come first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

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


class FairQueue(Generic[ItemT]):
    """The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (arXiv 2401.00588).

    Each tenant has a counter of the tokens that it was served, and the tenant with the lowest is next. Who comes back
    after a pause is lifted to the lowest of those that wait, so that nobody saves up credit (their algorithm 2). A
    generation is charged with what it is expected to cost when it is taken (their section on length prediction) and
    `charge` corrects that when it has ended.
    """

    def __init__(self) -> None:
        self._classes: dict[Priority, dict[str, deque[tuple[Claim, ItemT]]]] = {kind: {} for kind in Priority}
        self._served: dict[str, float] = {}  # tokens by tenant
        self._floor = 0.0  # the counter of who was taken last

    def __len__(self) -> int:
        return sum(self.waiting(kind) for kind in Priority)

    def waiting(self, priority: Priority, tenant: str | None = None) -> int:
        """How many of a class wait, of one tenant or of all."""
        tenants = self._classes[priority]
        return sum(map(len, tenants.values())) if tenant is None else len(tenants.get(tenant, ()))

    def ahead(self, claim: Claim) -> int:
        """How many would go before a further one of that class and tenant if all cost the same."""
        first = sum(self.waiting(kind) for kind in Priority if kind < claim.priority)
        turn = self.waiting(claim.priority, claim.tenant)
        others = (len(line) for name, line in self._classes[claim.priority].items() if name != claim.tenant)
        return first + turn + sum(min(length, turn + 1) for length in others)

    def push(self, claim: Claim, item: ItemT) -> None:
        """Adds one behind all others of its class and tenant."""
        if not any(claim.tenant in tenants for tenants in self._classes.values()):
            present = {tenant for tenants in self._classes.values() for tenant in tenants}
            floor = min((self._served[tenant] for tenant in present), default=self._floor)
            self._served[claim.tenant] = max(self._served.get(claim.tenant, 0.0), floor)
        self._classes[claim.priority].setdefault(claim.tenant, deque()).append((claim, item))

    def pop(self, eligible: Callable[[Claim], bool]) -> ItemT | None:
        """Takes the next one, and charges its tenant; None when nobody waits whose claim is `eligible` now."""
        for tenants in self._classes.values():
            able = [tenant for tenant, line in tenants.items() if eligible(line[0][0])]
            if able:
                tenant = min(able, key=self._served.__getitem__)
                claim, item = tenants[tenant][0]
                self.remove(claim, item)
                self._floor = self._served[tenant]
                self.charge(tenant, claim.tokens)
                return item
        return None

    def remove(self, claim: Claim, item: ItemT) -> None:
        """Takes one out that does not wait any more."""
        tenants = self._classes[claim.priority]
        tenants[claim.tenant].remove((claim, item))
        if not tenants[claim.tenant]:
            del tenants[claim.tenant]

    def charge(self, tenant: str, tokens: float) -> None:
        """Puts tokens on a tenant's account; negative ones correct an expectation that was too high."""
        self._served[tenant] = self._served.get(tenant, self._floor) + tokens
        if len(self._served) > REMEMBERED:
            idle = self._served.keys() - {name for tenants in self._classes.values() for name in tenants}
            if idle:
                del self._served[min(idle, key=self._served.__getitem__)]
