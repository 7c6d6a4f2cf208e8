"""The vocabulary of reasons is closed, bounded and explained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outrider.core.session.speculation_status import (
    ADVICE,
    LATE_STEPS,
    MAX_DETAIL,
    SpeculationReason,
    SpeculationStatus,
    SpeculationTally,
    nearest,
    printable,
    status_of,
)
from outrider.v1 import types_pb2

REASONS_PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
Reason = SpeculationReason


def tally(**steps: int) -> SpeculationTally:
    made = SpeculationTally()
    for name, count in steps.items():
        for _ in range(count):
            made.observe(SpeculationStatus(Reason[name]))
    return made


def test_every_reason_has_advice_a_wire_number_and_a_documented_row() -> None:
    section = (
        REASONS_PAGE.read_text(encoding="utf-8").partition("\n## Why is it not speculating?\n")[2].partition("\n## ")[0]
    )
    assert re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE) != []
    assert set(re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)) == {reason.value for reason in Reason}
    assert ADVICE.keys() == set(Reason)
    assert {f"SPECULATION_REASON_{reason.name}" for reason in Reason} == set(types_pb2.SpeculationReason.keys())


def test_a_status_sentence_has_the_rates_the_drafter_and_the_advice() -> None:
    resting = SpeculationStatus(Reason.RESTING, "", 9, 71.2, 65.4)
    assert "(plain 71 tokens/s, with drafting 65); " in resting.explanation
    assert "tokens/s" not in SpeculationStatus(Reason.RESTING, "", 9, 71.2, 0.0).explanation
    assert status_of(Reason.REFUSED, "d at v: no").explanation == (
        "the drafter was refused (d at v: no); do what the answer says"
    )


def test_a_peers_answer_becomes_one_bounded_line_without_control_characters() -> None:
    assert printable("a\x1b[31mb\nc\x00é") == "a [31mb c é"
    assert len(printable("x" * 100_000)) == MAX_DETAIL
    assert printable("x" * MAX_DETAIL) == "x" * MAX_DETAIL


def test_the_drafter_that_is_nearest_to_drafting_is_named() -> None:
    statuses = [SpeculationStatus(reason) for reason in (Reason.OTHER_TARGET, Reason.OTHER_TOKENIZER)]
    assert nearest(statuses).reason is Reason.OTHER_TARGET
    assert nearest([]).reason is Reason.NO_DRAFTER


@pytest.mark.parametrize(
    ("steps", "accepted", "reason", "count"),
    [
        ({}, 0, Reason.UNKNOWN, 0),
        ({"STARTING": 3}, 0, Reason.STARTING, 3),
        ({"STARTING": 30, "REFUSED": 2}, 0, Reason.REFUSED, 32),  # what was not known yet is not the reason
        ({"STARTING": 5, "LATE": 20, "DRAFTING": 3}, 2, Reason.DRAFTING, 28),
        ({"STARTING": 5, "LATE": 20, "DRAFTING": 3}, 0, Reason.LATE, 20),
        ({"DRAFTING": 9, "STARTING": 2}, 0, Reason.REJECTED, 9),
        ({"DRAFTING": 20, "RESTING": 80}, 15, Reason.RESTING, 80),
        ({"DRAFTING": 80, "RESTING": 20}, 15, Reason.DRAFTING, 80),
    ],
)
def test_a_generations_summary_is_the_reason_that_held_for_most_steps(
    steps: dict[str, int], accepted: int, reason: SpeculationReason, count: int
) -> None:
    found = tally(**steps).summary(accepted)
    assert (found.reason, found.steps) == (reason, count)


def test_an_answer_whose_one_accepted_draft_came_with_its_last_step_was_drafted_for() -> None:
    assert tally(LATE=3).summary(2) == SpeculationStatus(Reason.DRAFTING, steps=3)


def test_the_present_status_does_not_flicker_with_single_steps_that_no_draft_came_in_time_for() -> None:
    made = tally(RESTING=5, LATE=LATE_STEPS - 1)
    assert made.now.reason is Reason.RESTING
    made.observe(SpeculationStatus(Reason.LATE))
    assert made.now.reason is Reason.LATE
    made.observe(SpeculationStatus(Reason.DRAFTING))
    assert made.now.reason is Reason.DRAFTING


def test_a_tally_continues_at_the_next_owner() -> None:
    first, second = tally(NO_DRAFTER=3), SpeculationTally()
    first.observe(SpeculationStatus(Reason.RESTING, "", 0, 70.0, 60.0))
    second.load(json.loads(json.dumps(first.dump())))
    second.observe(SpeculationStatus(Reason.NO_DRAFTER))
    assert second.summary(0).steps == 4
    assert second.dump()["resting"] == [1, "", 70.0, 60.0]


@pytest.mark.parametrize("record", [{"no such reason": [1, "", 0, 0]}, {"late": 3}, {"late": ["x", "", 0, 0]}])
def test_a_malformed_tally_record_is_refused(record: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        SpeculationTally().load(record)
