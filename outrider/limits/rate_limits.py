"""Measures how long slots are held, and limits the rates of tenants and addresses."""

from __future__ import annotations

from collections.abc import Callable

from outrider.config import RouterConfig
from outrider.core.stats import Ema
from outrider.errors import Overloaded
from outrider.limits.token_buckets import TokenBuckets

EMA_WEIGHT = 0.1  # weight of one generation in the mean
GENERATING, ENDING = ("Generate", "Resume"), ("Cancel", "CloseSession")  # kinds of calls
CHECKING = ("CheckKey",)  # the kind of gateways' checks of keys
CHECKS_PER_S = 64.0  # least rate of checks of a tenant's keys: each gateway checks a key in use once in two seconds
ENDINGS_PER_S = 64.0  # least rate of calls that end something
MIN_RETRY_S = 0.1  # at least, for a refusal's retry_after


class ResidencyEma:
    """The mean time for which generations hold their slots, an exponential moving average.

    The expected wait follows from it by Little's law, also when few generations came lately: counting freed slots would
    take an idle hour for a slow cluster.
    """

    def __init__(self) -> None:
        self._seconds = Ema(EMA_WEIGHT)

    def observe(self, seconds: float) -> None:
        """Add the time for which a generation held its slot."""
        self._seconds.observe(seconds)

    def wait_s(self, ahead: int, places: int) -> float | None:
        """Return the expected wait in seconds for one of `places` slots behind `ahead` others; None before the first
        measurement."""
        return (ahead + 1) * self._seconds.mean / max(1, places) if self._seconds.count else None


def address_of(peer: str) -> str:
    """Return the address of a peer, as gRPC names it, without the port."""
    return peer.rpartition(":")[0] or peer


class CallRates:
    """The rates of calls. They are checked before any other work is done for a call, so that refusing costs little."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float]) -> None:
        per_s, per_min = config.tenant_requests_per_s, config.tenant_tokens_per_min
        of_address = config.address_requests_per_s
        self._addresses = TokenBuckets(of_address, max(1.0, of_address), clock) if of_address else None
        rates: dict[str, float] = {}
        if per_s:
            rates = {"generations": per_s, "others": per_s}
            rates |= {"checks": max(per_s, CHECKS_PER_S), "endings": max(per_s, ENDINGS_PER_S)}
        self._calls = {kind: TokenBuckets(rate, max(1.0, rate), clock) for kind, rate in rates.items()}
        self.tokens = TokenBuckets(per_min / 60, per_min, clock) if per_min else None  # tokens that slots spend

    def count_address(self, peer: str) -> None:
        """Count a call from a peer, as gRPC names it, before its caller is authenticated. Raises Overloaded."""
        if self._addresses is not None:
            address = address_of(peer)
            self._check(self._addresses, address, "this address is over its rate (address_requests_per_s)")
            self._addresses.take(address, 1.0)

    def count_call(self, tenant: str, method: str) -> bool:
        """Count a tenant's call of a method of the Inference service. Return whether it is over its rate and served
        nevertheless. Raises Overloaded.

        Calls of other kinds than generating and resuming have the same rate. Those that end something are always
        served, because what runs on would cost more; their rate is `ENDINGS_PER_S`, or the tenant's if that is more.
        Checks of a key have a rate of their own, because gateways make them, however few requests a tenant may send. A
        generation that runs may be resumed at any rate of tokens.
        """
        if method in ENDING:
            return self._ends_too_much(tenant)
        if method == "Generate" and self.tokens is not None:
            self._check(self.tokens, tenant, "this tenant is over its rate (tenant_tokens_per_min)")
        kind = "generations" if method in GENERATING else "checks" if method in CHECKING else "others"
        if buckets := self._calls.get(kind):
            self._check(buckets, tenant, "this tenant is over its rate (tenant_requests_per_s)")
            buckets.take(tenant, 1.0)
        return False

    def _ends_too_much(self, tenant: str) -> bool:
        buckets = self._calls.get("endings")
        if buckets is None or buckets.wait_s(tenant, 1.0) > 0:
            return buckets is not None
        buckets.take(tenant, 1.0)
        return False

    def count_replayed(self, tenant: str, tokens: int) -> None:
        """Count tokens that a tenant's client is sent again: they leave fewer to generate, and no debt."""
        if self.tokens is not None:
            self.tokens.take(tenant, max(0.0, min(tokens, self.tokens.level(tenant))))

    def _check(self, buckets: TokenBuckets, name: str, problem: str) -> None:
        if (wait := buckets.wait_s(name, 1.0)) > 0:
            raise Overloaded(f"{problem}; retry in {wait:.1f} s", retry_after=max(wait, MIN_RETRY_S))
