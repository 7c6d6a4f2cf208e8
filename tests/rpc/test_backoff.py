"""The pauses between attempts at something that fails."""

from __future__ import annotations

from itertools import pairwise

from outrider.rpc.backoff import Backoff, pause_s


def test_each_pause_is_twice_the_one_before_up_to_the_longest() -> None:
    pauses = [pause_s(attempt, 0.5, 30.0) for attempt in range(100)]
    assert pauses[:7] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert all(before <= after <= 30.0 for before, after in pairwise(pauses))
    assert pause_s(10**9, 0.5, 30.0) == 30.0


async def test_a_long_run_resets_the_backoff() -> None:
    backoff = Backoff(0.001, 0.004, steady_s=60.0)
    taken = []
    for ran_s in (0.0, 1.0, 60.0, 60.1, 0.0):
        backoff.ended_after(ran_s)
        taken.append(backoff.next_s)
        await backoff.wait()
    assert taken == [0.001, 0.002, 0.004, 0.001, 0.002]
    assert backoff.attempts == 2
