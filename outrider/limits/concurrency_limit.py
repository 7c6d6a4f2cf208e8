"""Limits how many are in use at the same time, in total and per key (for example per tenant)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import Overloaded


class ConcurrencyLimit:
    """At most `most` of something at once, and at most `of_key` with one key, for example of one tenant.

    What is beyond is refused with `problem`, and a pause of `retry_s` seconds.
    """

    def __init__(self, problem: str, most: int, *, of_key: float = math.inf, retry_s: float = 1.0) -> None:
        self._problem = problem
        self._most = most
        self._of_key = of_key
        self._retry_s = retry_s
        self._held: Counter[str] = Counter()  # by key

    @contextmanager
    def hold(self, key: str = "") -> Iterator[None]:
        """Count one until the body has ended. Raises Overloaded."""
        if self._held.total() >= self._most or self._held[key] >= self._of_key:
            raise Overloaded(self._problem, self._retry_s)
        self._held[key] += 1
        try:
            yield
        finally:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
