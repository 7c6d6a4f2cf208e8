"""What tenants hold of one thing that all of them share."""

from __future__ import annotations

from collections import Counter

from outrider.errors import Overloaded

RETRY_S = 1.0  # pause that a refused caller is asked for


class TenantShares:
    """Limits a resource to `most`; one tenant may hold at most what remains free.

    So a tenant alone may hold half, and there is always room for the next one. Where the router needs no keys all
    callers are one tenant, without a name, which may hold all.
    """

    def __init__(self, most: int, what: str, *, least: int = 0) -> None:
        """`what`: the resource's name, for errors; `least`: a tenant's guaranteed minimum, if available."""
        self._most = most
        self._what = what
        self._least = least
        self._of_tenant: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """The sum that all tenants hold."""
        return self._of_tenant.total()

    def most_of(self, tenant: str) -> int:
        """Return the most that a tenant may hold while no other one holds any."""
        return max(self._least, self._most // 2) if tenant else self._most

    def add(self, tenant: str, amount: int) -> None:
        """Count more of a tenant. Raises Overloaded, and adds nothing, if that is too much."""
        free = self._most - self.held - amount
        if free < 0:
            raise Overloaded(f"the gateway holds as many {self._what} as it can; try again", RETRY_S)
        if tenant and self._of_tenant[tenant] + amount > max(self._least, free):
            raise Overloaded(
                f"the gateway holds as many {self._what} of this tenant as it has left for others; try again when one "
                "of its requests has ended",
                RETRY_S,
            )
        self._of_tenant[tenant] += amount

    def release(self, tenant: str, amount: int) -> None:
        """Count `amount` of a tenant no longer."""
        self._of_tenant[tenant] -= amount
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
