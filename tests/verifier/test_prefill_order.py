"""Prompts of several tenants are read in equal shares, whoever came first and however long they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verifier_svc.prefill_order import PrefillOrder

CHUNK = 100


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


def test_tenants_take_turns_and_within_one_the_first_goes_first() -> None:
    reading = Reading()
    for name in ("a1", "a2", "b1"):
        reading.open(name, 301)
    assert [reading.step() for _ in range(9)] == ["a1", "b1", "a1", "b1", "a1", "b1", "a2", "a2", "a2"]


def test_who_comes_later_neither_pays_for_the_past_nor_saves_up() -> None:
    reading = Reading()
    reading.open("a1", 10_001)
    assert {reading.step() for _ in range(50)} == {"a1"}
    reading.open("b1", 301)
    assert [reading.step() for _ in range(6)].count("b1") == 3  # and not all three at once before a's next
    assert reading.step() == "a1"
    for number in range(2, 6):  # small ones, one after the other
        reading.open(f"b{number}", 51)
        assert f"b{number}" in reading.step() + reading.step()
    assert len(reading.order._read) <= 2


def test_a_crowd_of_one_tenant_does_not_hold_up_another() -> None:
    reading = Reading()
    for number in range(100):
        reading.open(f"a{number}", 1_001)
    reading.step()
    reading.open("b", 101)
    assert "b" in (reading.step(), reading.step())
