"""Of what keeps several drafters from drafting, the user gets the cause, and nothing that is over."""

from __future__ import annotations

import pytest

from outrider.core.session.speculation_status import SpeculationReason, SpeculationStatus
from outrider.errors import OutriderError, Overloaded, Unavailable
from outrider.store.registry import Role, Worker
from outrider.v1.drafter_pb2 import AttachResponse
from router.drafters.obstacles import Obstacles
from router.scheduling.placement import DrafterPlacement


def worker(name: str, role: Role = "drafter") -> Worker:
    return Worker(name, role, f"{name}:1", "m", b"", 1, 1, 1, 0, 1)


VERIFIER, MID, LOW = worker("verifier", "verifier"), worker("mid"), worker("low")
UPPER, LOWER = DrafterPlacement(MID, VERIFIER), DrafterPlacement(LOW, MID)
BOTH = {"mid", "low"}


@pytest.fixture
def obstacles() -> Obstacles:
    return Obstacles(VERIFIER)


def detail(obstacles: Obstacles) -> str:
    return obstacles.foremost.detail if obstacles.foremost else ""


def test_the_obstacle_of_the_upper_tier_is_named_before_its_consequence(obstacles: Obstacles) -> None:
    obstacles.on_attached(UPPER, AttachResponse(refused="forged ticket"), BOTH)
    obstacles.on_attached(LOWER, AttachResponse(refused="unknown session"), BOTH)
    assert detail(obstacles) == "drafter mid:1 at verifier:1: forged ticket"
    obstacles.on_attached(UPPER, AttachResponse(), BOTH)
    assert detail(obstacles) == "drafter low:1 at mid:1: unknown session"
    obstacles.on_attached(LOWER, AttachResponse(), BOTH)
    assert obstacles.foremost is None


@pytest.mark.parametrize("error", [Overloaded("all slots are in use"), Unavailable("connection refused")])
def test_a_failure_counts_until_another_drafter_is_attached_in_its_tier(
    obstacles: Obstacles, error: OutriderError
) -> None:
    obstacles.on_failed(UPPER, error)
    obstacles.on_attached(LOWER, AttachResponse(), {"low"})
    assert detail(obstacles) == f"drafter mid:1: {error}"
    obstacles.on_attached(DrafterPlacement(LOW, VERIFIER), AttachResponse(), {"low"})
    assert obstacles.foremost is None


def test_a_drafter_that_is_detached_is_named_no_more(obstacles: Obstacles) -> None:
    obstacles.on_attached(UPPER, AttachResponse(unreachable="no route"), BOTH)
    obstacles.forget(MID)
    assert obstacles.foremost is None


def test_suspected_or_detached_drafters_are_named_as_the_reason(obstacles: Obstacles) -> None:
    obstacles.on_placed([], [MID, LOW])
    assert obstacles.foremost == SpeculationStatus(
        SpeculationReason.UNREACHABLE, "drafter mid:1, drafter low:1 failed lately and will be asked again soon"
    )
    obstacles.on_placed([], [])
    assert obstacles.foremost.reason is SpeculationReason.NO_DRAFTER
    assert "were detached" in detail(obstacles)
    obstacles.on_placed([UPPER], [])
    assert obstacles.foremost is None


def test_a_missing_drafter_replaces_earlier_obstacles(obstacles: Obstacles) -> None:
    obstacles.on_failed(UPPER, Unavailable("connection refused"))
    none = SpeculationStatus(SpeculationReason.NO_DRAFTER)
    obstacles.on_no_drafter(none)
    assert obstacles.foremost == none
