"""Of what keeps several drafters from drafting, the user is told the cause, and nothing that is over."""

from __future__ import annotations

import pytest

from outrider.core.speculation import SpeculationReason, SpeculationStatus
from outrider.errors import OutriderError, Overloaded, Unavailable
from outrider.store.registry import Role, Worker
from outrider.v1.drafter_pb2 import AttachResponse
from router.hindrances import Hindrances
from router.placement import Placed


def worker(name: str, role: Role = "drafter") -> Worker:
    return Worker(name, role, f"{name}:1", "m", b"", 1, 1, 1, 0, 1)


VERIFIER, MID, LOW = worker("verifier", "verifier"), worker("mid"), worker("low")
UPPER, LOWER = Placed(MID, VERIFIER), Placed(LOW, MID)
BOTH = {"mid", "low"}


@pytest.fixture
def hindrances() -> Hindrances:
    return Hindrances(VERIFIER)


def detail(hindrances: Hindrances) -> str:
    return hindrances.foremost.detail if hindrances.foremost else ""


def test_with_tiers_the_cause_is_named_and_not_what_follows_from_it(hindrances: Hindrances) -> None:
    hindrances.answered(UPPER, AttachResponse(refused="forged ticket"), BOTH)
    hindrances.answered(LOWER, AttachResponse(refused="unknown session"), BOTH)
    assert detail(hindrances) == "drafter mid:1 at verifier:1: forged ticket"
    hindrances.answered(UPPER, AttachResponse(), BOTH)
    assert detail(hindrances) == "drafter low:1 at mid:1: unknown session"
    hindrances.answered(LOWER, AttachResponse(), BOTH)
    assert hindrances.foremost is None


@pytest.mark.parametrize("error", [Overloaded("all slots are in use"), Unavailable("connection refused")])
def test_a_failure_counts_until_another_drafter_is_in_that_place(hindrances: Hindrances, error: OutriderError) -> None:
    hindrances.failed(UPPER, error)
    hindrances.answered(LOWER, AttachResponse(), {"low"})
    assert detail(hindrances) == f"drafter mid:1: {error}"
    hindrances.answered(Placed(LOW, VERIFIER), AttachResponse(), {"low"})
    assert hindrances.foremost is None


def test_who_is_detached_is_named_no_more(hindrances: Hindrances) -> None:
    hindrances.answered(UPPER, AttachResponse(unreachable="no route"), BOTH)
    hindrances.forget(MID)
    assert hindrances.foremost is None


def test_where_drafters_fit_and_none_is_asked_the_reason_is_named(hindrances: Hindrances) -> None:
    hindrances.placed([], [MID, LOW])
    assert hindrances.foremost == SpeculationStatus(
        SpeculationReason.UNREACHABLE, "drafter mid:1, drafter low:1 failed lately and will be asked again soon"
    )
    hindrances.placed([], [])
    assert hindrances.foremost.reason is SpeculationReason.NO_DRAFTER
    assert "were let go" in detail(hindrances)
    hindrances.placed([UPPER], [])
    assert hindrances.foremost is None


def test_once_nobody_is_there_that_alone_counts(hindrances: Hindrances) -> None:
    hindrances.failed(UPPER, Unavailable("connection refused"))
    none = SpeculationStatus(SpeculationReason.NO_DRAFTER)
    hindrances.nobody(none)
    assert hindrances.foremost == none
