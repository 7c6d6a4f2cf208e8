"""At most a number at once, in total and per key."""

from __future__ import annotations

import pytest

from outrider.errors import Overloaded
from outrider.limits.concurrency_limit import ConcurrencyLimit


def test_a_finished_holder_frees_its_capacity() -> None:
    limit = ConcurrencyLimit("full", 3, of_key=2, retry_s=7.0)
    for _ in range(2):
        with limit.hold("a"), limit.hold("a"):
            with pytest.raises(Overloaded, match="full") as refused, limit.hold("a"):
                pass
            assert refused.value.retry_after == 7.0
            with limit.hold("b"), pytest.raises(Overloaded), limit.hold("c"):
                pass
        with pytest.raises(KeyError), limit.hold("a"):
            raise KeyError


def test_a_key_without_a_bound_may_hold_all() -> None:
    limit = ConcurrencyLimit("full", 2)
    with limit.hold(), limit.hold(), pytest.raises(Overloaded), limit.hold("other"):
        pass
