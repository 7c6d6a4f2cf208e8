"""Prompts of several tenants are read in equal shares, whoever came first and however long they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.core.control.cost.budget import COST, CostModel
from verifier_svc.steps.step_choice import LEAST_CHUNK, SLOWER, PrefillOrder, chunk_beside_others

CHUNK = 100
BY_ROWS = CostModel([(tokens, tokens * COST.overhead_s) for tokens in range(1, 2 * CHUNK)])  # as on a CPU
BY_PASS = CostModel([(1, 0.05), (2 * CHUNK, 0.06)])  # as on a GPU


class Reading:
    """Sessions that a verifier reads, a chunk a step."""

    def __init__(self) -> None:
        self.order = PrefillOrder()
        self.sessions: list[Any] = []

    def open(self, name: str, unread: int) -> None:
        self.sessions.append(SimpleNamespace(id=name, tenant=name[0], unread=unread))

    def step(self) -> str:
        """Read a chunk, and return whose it was."""
        chunk, names = CHUNK, []
        for session in self.order.sort(self.sessions):
            taken = min(chunk, session.unread - 1)
            if taken > 0:
                chunk -= taken
                session.unread -= taken
                names.append(session.id)
                self.order.add(session.tenant, taken)
        self.sessions = [session for session in self.sessions if session.unread > 1]
        return "+".join(names)


def test_tenants_take_turns_and_a_tenants_first_prompt_is_read_first() -> None:
    reading = Reading()
    for name in ("a1", "a2", "b1"):
        reading.open(name, 301)
    assert [reading.step() for _ in range(9)] == ["a1", "b1", "a1", "b1", "a1", "b1", "a2", "a2", "a2"]


def test_a_late_tenant_neither_pays_for_the_past_nor_saves_up() -> None:
    reading = Reading()
    reading.open("a1", 10_001)
    assert {reading.step() for _ in range(50)} == {"a1"}
    reading.open("b1", 301)
    assert [reading.step() for _ in range(6)].count("b1") == 3  # and not all three at once before a's next
    assert reading.step() == "a1"
    for number in range(2, 6):  # small ones, one after the other
        reading.open(f"b{number}", 51)
        assert f"b{number}" in reading.step() + reading.step()


def test_a_crowd_of_one_tenant_does_not_hold_up_another() -> None:
    reading = Reading()
    for number in range(100):
        reading.open(f"a{number}", 1_001)
    reading.step()
    reading.open("b", 101)
    assert "b" in (reading.step(), reading.step())


def chunk(cost: CostModel, *unread: tuple[str, int]) -> int:
    """The tokens that a step reads for sessions of these tenants."""
    sessions: list[Any] = [SimpleNamespace(tenant=tenant, unread=count) for tenant, count in unread]
    return chunk_beside_others(sessions, CHUNK, cost)


@pytest.mark.parametrize("own", [[], [("a", 1)] * 3, [("a", 30), ("a", 500)]])
def test_a_tenants_own_prompts_take_the_whole_chunk(own: list[tuple[str, int]]) -> None:
    assert chunk(BY_ROWS, ("a", 1000), *own) == CHUNK


def test_a_long_prompt_does_not_make_another_tenants_steps_more_than_twice_as_long() -> None:
    assert chunk(BY_ROWS, ("a", 1000), ("b", 1)) == LEAST_CHUNK
    for decoding in (20, 30):
        read = chunk(BY_ROWS, ("a", 1000), *[("b", 1)] * decoding)
        assert decoding + read + 1 == SLOWER * (decoding + 1)
    for name, unread in (("b", 15), ("c", 1000)):  # however many tenants have long ones
        read = chunk(BY_ROWS, ("a", 1000), ("a", 1), (name, unread), ("b", 25))
        assert 1 + read + 1 == SLOWER * (1 + (40 if name == "b" else 25) + 1)
    assert chunk(BY_ROWS, ("a", 1000), ("b", 1), ("c", 1000)) == LEAST_CHUNK


def test_a_prompt_is_read_in_whole_chunks_where_that_delays_others_little() -> None:
    assert chunk(BY_PASS, ("a", 1000), ("b", 1)) == CHUNK
    assert chunk(BY_ROWS, ("a", 1000), ("b", 80)) == CHUNK
    assert chunk(BY_ROWS, ("a", 1), ("b", 1)) == CHUNK
