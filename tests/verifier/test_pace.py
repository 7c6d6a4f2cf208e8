"""How a session's drafters are to work."""

import asyncio
import time

import pytest

from outrider.core.control.arms.arm import OverlapMode
from outrider.core.control.cost.calibration import Calibration
from outrider.core.control.holds.arrival_model import ArrivalPatterns
from outrider.core.control.holds.hold_policy import HoldPolicy
from outrider.core.sampling.sampler import Choice
from outrider.core.session.contract import Contract, Plan, PlanOverlap, StepReport
from outrider.core.tree.delta import Delta
from outrider.engine.kv.kv_slots import AcquiredSlot
from outrider.upstream.servicer import UpstreamServicer
from outrider.upstream.ticket_verifier import TicketVerifier
from outrider.upstream.upstream_session import UpstreamStream
from outrider.v1.types_pb2 import Heartbeat
from verifier_svc.commit_queue import StepCommit
from verifier_svc.session import SessionStart, VerifierSession


async def no_keys() -> dict[bytes, float]:
    return {}


def publish(sink: UpstreamServicer, session: VerifierSession, commit: StepCommit) -> None:
    sink.sender.publish(session, commit.position, [choice.token for choice in commit.choices])


async def assert_nothing_to_send(stream: UpstreamStream) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await stream.next()


def sink_and_session(overlap: PlanOverlap = PlanOverlap.MEASURED) -> tuple[UpstreamServicer, VerifierSession]:
    terms = Contract(seed=1, max_tokens=100), Plan(version=1, depth=8, wait_us=1_000_000, overlap=overlap)
    session = VerifierSession(
        SessionStart("s", "", 1, (1, 2, 3), 3, *terms, 64), AcquiredSlot(0, 2, None), 4096, ArrivalPatterns()
    )
    return UpstreamServicer("verifier", b"", TicketVerifier(no_keys, time.time)), session


async def test_commits_for_drafters_at_rest_are_held_back_and_joined() -> None:
    sink, session = sink_and_session()
    stream = UpstreamStream("one", Heartbeat)
    session.subscribe(stream, 1, Calibration()).plan_version = 1
    for resting in (True, True, False):
        session.terms.set_overlap_mode(OverlapMode.REST if resting else OverlapMode.TURNS)
        assert session.terms.min_path_score == (1.0 if resting else 0.0)
        publish(sink, session, session.commit([Choice(7, 1.0, b"")], StepReport(), now=1.0))
        assert session.awaited != resting
        if resting:
            await assert_nothing_to_send(stream)
    frame = await stream.next()
    assert frame is not None
    assert (list(frame.commit.tokens), frame.commit.min_path_score) == ([7, 7, 7], 0.0)


async def test_drafters_are_paused_while_a_step_runs_unless_they_still_prefill() -> None:
    sink, session = sink_and_session()
    begun, reading, done = streams = [UpstreamStream(name, Heartbeat) for name in ("begun", "reading", "done")]
    for stream in streams:
        session.grant(session.subscribe(stream, 1, Calibration()))
    for stream in (begun, done):
        delta = Delta(2, session.tree.digest, 1, (0,), (7,), (-0.5,))
        session.graft(session.subscriptions[stream], delta, 1.0, passing=False)
    session.exhaust(session.subscriptions[done], 2)
    sink.sender.pause(session)
    frame = await begun.next()
    assert frame is not None
    assert (frame.commit.position, list(frame.commit.tokens), frame.commit.min_path_score) == (3, [], 1.0)
    await assert_nothing_to_send(reading)
    await assert_nothing_to_send(done)
    publish(sink, session, session.commit([Choice(8, 1.0, b"")], StepReport(), now=1.0))
    after = await begun.next()
    assert after is not None
    assert (list(after.commit.tokens), after.commit.min_path_score) == ([8], 0.0)


async def test_a_change_of_the_plan_reaches_drafters_at_rest() -> None:
    sink, session = sink_and_session()
    stream = UpstreamStream("one", Heartbeat)
    session.subscribe(stream, 1, Calibration())
    session.terms.set_overlap_mode(OverlapMode.REST)
    publish(sink, session, session.commit([Choice(7, 1.0, b"")], StepReport(), now=1.0))
    sink.sender.refresh(session)
    frame = await stream.next()
    assert frame is not None
    assert (list(frame.commit.tokens), frame.commit.min_path_score, frame.commit.plan.version) == ([7], 1.0, 1)


async def test_drafters_do_not_delay_the_first_token() -> None:
    _, session = sink_and_session()
    assert (session.terms.overlap_mode, session.terms.min_path_score) == (OverlapMode.TURNS, 1.0)
    session.commit([Choice(7, 1.0, b"")], StepReport(), now=1.0)
    assert session.terms.min_path_score == 0.0


@pytest.mark.parametrize(
    ("overlap", "followed"),
    [
        (PlanOverlap.MEASURED, [OverlapMode.TURNS, OverlapMode.AHEAD, OverlapMode.REST]),
        (PlanOverlap.ALWAYS, [OverlapMode.AHEAD, OverlapMode.AHEAD, OverlapMode.AHEAD]),
        (PlanOverlap.NEVER, [OverlapMode.TURNS, OverlapMode.TURNS, OverlapMode.REST]),
    ],
)
async def test_the_plan_decides_whether_drafters_may_draft_ahead(
    overlap: PlanOverlap, followed: list[OverlapMode]
) -> None:
    sink, session = sink_and_session(overlap)
    stream = UpstreamStream("one", Heartbeat)
    session.subscribe(stream, 1, Calibration())
    for now, (way, kept) in enumerate(
        zip((OverlapMode.TURNS, OverlapMode.AHEAD, OverlapMode.REST), followed, strict=True), 1
    ):
        session.terms.set_overlap_mode(way)
        session.terms.hold_tokens_per_s = 70.0
        assert session.terms.overlap_mode is kept
        publish(sink, session, session.commit([Choice(7, 1.0, b"")], StepReport(), now=now))
    sink.sender.refresh(session)
    frame = await stream.next()
    assert frame is not None
    assert (frame.commit.ahead, frame.commit.time_cost_tokens_per_s > 0) == (
        session.terms.ahead,
        not session.terms.ahead,
    )


async def test_a_plan_in_rounds_delays_a_step_until_its_depth_or_its_wait_is_reached() -> None:
    policy, sessions = HoldPolicy(), [sink_and_session(PlanOverlap.ROUNDS)[1] for _ in range(3)]
    assert policy.required_hold(sessions, 1.0) == (None, 0.0)  # before the first commit
    for session in sessions:
        session.subscribe(UpstreamStream("one", Heartbeat), 1, Calibration())
        session.commit([Choice(7, 1.0, b"")], StepReport(), now=1.0)
    complete, incomplete, other = sessions
    parent = complete.tree.root
    for token in range(complete.ceilings.depth):
        parent = complete.tree.add(parent, token, -0.1)
    assert policy.required_hold(sessions, 1.25) == (incomplete, 0.75)  # of the second that the plan has
    assert policy.required_hold([other, incomplete], 1.25) == (other, 0.75)
    assert policy.required_hold([complete], 1.25) == (None, 0.0)
    assert policy.required_hold(sessions, 2.5) == (None, 0.0)
