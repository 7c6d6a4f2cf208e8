"""8. Liveness."""

import asyncio
import os
import signal
import time

import grpc
import pytest

from outrider.fleet.cluster import LocalCluster
from outrider.rpc.channels import LIVENESS
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2
from router.sessions.verifier_link import HEARTBEATS_PER_LEASE
from tests.e2e.mini_router import attach, described
from tests.e2e.protocol.conftest import Text
from tests.e2e.protocol.peers import calling, decoding, drafting
from tests.e2e.protocol.stream_probe import Inbox
from tests.e2e.protocol.upstreams import upstream_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

# The values of docs/protocol.md.
HEARTBEAT_S = 0.5
SILENCE_S = 2.5
STUCK_S = 30.0

SLACK_S = 1.0  # two loaded cores
HEARTBEAT = types_pb2.Heartbeat()


def in_time(began: float) -> bool:
    """Return whether a silence since then was noticed neither too early nor too late."""
    return SILENCE_S - 0.1 < time.monotonic() - began < SILENCE_S + SLACK_S


async def test_a_silent_peer_is_taken_for_dead(verifier: str, drafter: str, text: Text) -> None:
    async def a_drafter() -> None:
        async with (
            decoding(verifier, tokens=text.prompt, contract=text.contract, window=4) as router,
            drafting(verifier) as silent,
            drafting(verifier) as other,
        ):
            for peer in (silent, other):
                await peer.attach(router.session)
            silent.beats = False
            silent.send_frame(heartbeat=HEARTBEAT)
            began = time.monotonic()
            end = await silent.inbox.end()
            assert in_time(began)
            assert (end.code, "silent" in end.details) == (grpc.StatusCode.UNAVAILABLE, True)
            assert other.inbox.open
            await router.acknowledge(4)
            assert await router.generated(8) == text.answer[:8]
            assert router.reports[-1].drafters == 1

    async def a_drafter_that_never_greets() -> None:
        async with drafting(verifier, greets=False) as silent:
            silent.beats = False
            began = time.monotonic()
            assert (await silent.inbox.end()).code is grpc.StatusCode.UNAVAILABLE
            assert in_time(began)

    async def a_router_that_never_starts() -> None:
        async with calling(verifier) as silent:
            silent.beats = False
            began = time.monotonic()
            assert (await silent.inbox.end()).code is grpc.StatusCode.UNAVAILABLE
            assert in_time(began)

    async def an_upstream() -> None:
        async with upstream_of(drafter) as peer:
            peer.stream.snapshot(text.prompt)
            await peer.stream.inbox.take("delta")
            again = pb.AttachRequest(session_id=peer.subscribed.session_id, epoch=1, upstream=peer.upstream.address)
            again.ticket = b"a later ticket"
            await peer.drafter.Attach(again)
            peer.stream.beats = False
            peer.stream.send_frame(heartbeat=HEARTBEAT)
            began = time.monotonic()
            await peer.stream.inbox.end()
            assert in_time(began)
            stream = await peer.upstream.stream(1)
            await stream.inbox.take("hello")
            subscribed = await stream.inbox.take("subscribe")
            assert (subscribed.session_id, subscribed.ticket) == (peer.subscribed.session_id, b"a later ticket")
            stream.snapshot(text.whole[:40], attachment=subscribed.attachment)
            assert (await stream.inbox.take("delta", subscribed.attachment)).root_position == 39

    await asyncio.gather(a_drafter(), a_drafter_that_never_greets(), a_router_that_never_starts(), an_upstream())


async def test_a_peer_that_is_stuck_in_one_step_is_taken_for_dead(verifier: str, drafter: str, text: Text) -> None:
    async with drafting(verifier) as slow, drafting(verifier) as stuck:
        slow.send_frame(heartbeat=types_pb2.Heartbeat(steps=3, running_ms=int(STUCK_S * 1000)))
        stuck.beats = False  # one that met the end would fail the call, in gRPC's words
        stuck.send_frame(heartbeat=types_pb2.Heartbeat(steps=3, running_ms=int(STUCK_S * 1000) + 1))
        end = await stuck.inbox.end()
        assert (end.code, "stuck" in end.details) == (grpc.StatusCode.UNAVAILABLE, True)
        assert slow.inbox.open
    async with upstream_of(drafter) as peer:
        peer.stream.send_frame(heartbeat=types_pb2.Heartbeat(running_ms=int(STUCK_S * 1000) + 1))
        stream = await peer.upstream.stream(1)
        assert (await stream.inbox.take("subscribe")).session_id == peer.subscribed.session_id


async def test_an_attached_drafter_whose_stream_breaks_reconnects(drafter: str, text: Text) -> None:
    async with upstream_of(drafter) as peer:
        peer.stream.snapshot(text.prompt)
        await peer.stream.inbox.take("delta")
        for number in (1, 2):
            (await peer.upstream.stream(number - 1)).outgoing.put_nowait(None)
            stream = await peer.upstream.stream(number)
            subscribed = await stream.inbox.take("subscribe")
            stream.snapshot(text.prompt, attachment=subscribed.attachment)
            assert (await stream.inbox.take("delta")).attachment == subscribed.attachment
        await peer.drafter.Detach(pb.DetachRequest(session_id=peer.subscribed.session_id, epoch=1))
        await stream.inbox.take("unsubscribe")
        stream.outgoing.put_nowait(None)
        await asyncio.sleep(0.5)
        assert len(peer.upstream.streams) == 3


async def test_every_peer_sends_a_heartbeat_every_half_second(verifier: str, drafter: str, text: Text) -> None:
    async def regular(inbox: Inbox) -> list[types_pb2.Heartbeat]:
        inbox.frames.clear()
        for _ in range(3):
            before = inbox.last
            await inbox.until(lambda before=before: inbox.last > before, HEARTBEAT_S + SLACK_S)  # type: ignore[misc]
        return inbox.of("heartbeat")

    async def upwards() -> None:
        async with upstream_of(drafter) as peer:
            peer.stream.snapshot(text.prompt)
            await peer.stream.inbox.until(lambda: any(frame.exhausted for frame in peer.stream.inbox.of("delta")))
            beats = await regular(peer.stream.inbox)
            there = await peer.drafter.Describe(types_pb2.DescribeRequest())
            assert {(beat.steps, beat.running_ms) for beat in beats} == {(there.levels, 0)}
            assert there.levels > 0

    async def downwards() -> None:
        # A keepalive ping every tenth of a second, where ours come every second, does no harm.
        impatient = (("grpc.keepalive_time_ms", 100), ("grpc.http2.min_time_between_pings_ms", 100))
        async with (
            decoding(verifier, tokens=text.prompt, contract=text.contract, window=2) as router,
            drafting(verifier, options=impatient) as peer,
        ):
            await router.generated(2)
            await peer.attach(router.session)
            for beats in await asyncio.gather(regular(router.inbox), regular(peer.inbox)):
                there = await described(verifier)
                assert {(beat.steps, beat.running_ms) for beat in beats} == {(there.steps, 0)}
                assert there.steps > 0
            assert peer.inbox.open

    await asyncio.gather(upwards(), downwards())
    wanted = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 1000, "grpc.http2.ping_timeout_ms": 1000}
    assert wanted.items() <= dict(LIVENESS).items()


async def test_a_router_that_is_silent_for_its_lease_loses_the_session_and_its_kv_stays(
    verifier: str, text: Text
) -> None:
    opening = {"tokens": text.prompt, "contract": text.contract, "window": 2, "lease_ms": 2000}
    async with decoding(verifier, **opening) as silent, decoding(verifier, **opening) as alive:
        await silent.generated(2)
        silent.beats = False
        began = time.monotonic()
        end = await silent.inbox.end()
        assert (end.code, "silent" in end.details) == (grpc.StatusCode.UNAVAILABLE, True)
        assert 1.0 < time.monotonic() - began < 2.0 + SLACK_S
        await asyncio.sleep(2.1)
        assert alive.inbox.open
        again = text.whole[: len(text.prompt) + 2]
        later = {"tokens": again, "answer_position": len(text.prompt), "session_id": silent.session, "epoch": 1}
        async with decoding(verifier, **opening | later) as router:
            assert (await router.inbox.take("started")).cached == len(again) - 1
    assert HEARTBEATS_PER_LEASE == 4  # of the real router, in a lease


async def test_a_frozen_drafter_costs_only_speed_and_returns_when_it_thaws(
    cluster: LocalCluster, verifier: str, text: Text
) -> None:
    process = cluster.processes["drafter-1"]
    async with decoding(verifier, tokens=text.prompt, contract=text.contract, window=4) as router:
        await attach(process.address, router.session, verifier)
        count = 0

        async def on() -> int:
            """Four tokens more; how many drafters the last step had."""
            nonlocal count
            await router.acknowledge(count)
            count += 4
            assert (await router.generated(count))[:count] == text.answer[:count]
            return router.reports[-1].drafters

        async def on_until(drafters: int) -> None:
            async with asyncio.timeout(SILENCE_S + 3):
                while await on() != drafters:
                    await asyncio.sleep(0.1)

        await on_until(1)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            for _ in range(5):
                await on()
            assert time.monotonic() - began < 3.0  # no step waits for it, which would take ten
            await on_until(0)
            assert time.monotonic() - began < SILENCE_S + SLACK_S
        finally:
            os.kill(process.pid, signal.SIGCONT)
        await on_until(1)
