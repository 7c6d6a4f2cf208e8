"""The router's end of a generation on a verifier, against a verifier on real gRPC."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.core.session.contract import OFF, Contract
from outrider.core.session.decoding import DecodeStart, ReceivedCommit
from outrider.errors import Moved, Unavailable
from outrider.rpc.server import serving
from outrider.store.registry import Worker
from outrider.v1 import types_pb2, verifier_pb2
from outrider.v1.verifier_pb2_grpc import add_VerifierServicer_to_server
from router.sessions.verifier_client import DecodeIdle, DecodeStream
from router.sessions.verifier_link import VerifierLink
from tests.router.fakes import FakeVerifier

STEPS = 12  # of the event loop, by which a call's metadata have been sent


def start(session_id: str) -> DecodeStart:
    return DecodeStart(
        session_id=session_id,
        tenant="",
        epoch=1,
        model="target",
        tokenizer_digest=b"digest",
        tokens=(1, 2, 3),
        digest=0,
        answer_position=3,
        contract=Contract(seed=1, max_tokens=8),
        plan=OFF,
        window=64,
        lease_s=10.0,
        timeout_s=None,
    )


@pytest.mark.parametrize("steps", range(STEPS))
async def test_a_stream_cancelled_while_it_opens_ends_at_once(steps: int) -> None:
    def register(server: grpc.aio.Server) -> list[str]:
        add_VerifierServicer_to_server(FakeVerifier([1]), server)
        return []

    async with serving("127.0.0.1:0", register, drain_s=0.1) as address, grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()
        worker = Worker("verifier-1", "verifier", address, "target", b"digest", 4096, 64, 1, 0, 0)
        link = VerifierLink(worker, channel, lease_s=10.0)
        stream = DecodeStream(worker, link, start("a"))
        opening = asyncio.create_task(stream.open())
        for _ in range(steps):
            await asyncio.sleep(0)
        stream.cancel()
        async with asyncio.timeout(5.0):
            await asyncio.wait({opening})
        assert opening.cancelled()
        await link.close()


class QuietLink:
    """A link on which nothing is sent."""

    def begin(self, generation: DecodeStream, start: verifier_pb2.DecodeStart) -> int:
        return 1

    def end(self, handle: int) -> None:
        pass


async def opened() -> DecodeStream:
    worker = Worker("verifier-1", "verifier", "127.0.0.1:1", "target", b"digest", 4096, 64, 1, 0, 0)
    stream = DecodeStream(worker, QuietLink(), start("a"))  # type: ignore[arg-type]
    opening = asyncio.create_task(stream.open())
    await asyncio.sleep(0)
    stream.receive(verifier_pb2.DecodeStarted(handle=1))
    await opening
    return stream


def commit(position: int, tokens: int, gaps: int) -> verifier_pb2.DecodeCommit:
    return verifier_pb2.DecodeCommit(
        handle=1, epoch=1, position=position, tokens=[5] * tokens, gaps=[0.5] * gaps, report=types_pb2.StepReport()
    )


async def test_commits_before_a_malformed_one_count_and_later_ones_do_not() -> None:
    stream = await opened()
    stream.receive(commit(3, 1, 1))
    stream.receive(commit(4, 2, 1))
    stream.receive(commit(4, 1, 1))
    stream.receive(verifier_pb2.DecodeEnded(handle=1, reason=types_pb2.FINISH_REASON_LENGTH))
    stream.receive(Moved("too late"))
    event = await stream.next()
    assert isinstance(event, ReceivedCommit)
    assert event.position == 3
    for _ in range(2):
        with pytest.raises(Unavailable, match="gaps: are 1 for 2 tokens"):
            await stream.next()


async def test_a_verifier_that_sends_before_the_start_is_given_up() -> None:
    worker = Worker("verifier-1", "verifier", "127.0.0.1:1", "target", b"digest", 4096, 64, 1, 0, 0)
    stream = DecodeStream(worker, QuietLink(), start("a"))  # type: ignore[arg-type]
    opening = asyncio.create_task(stream.open())
    await asyncio.sleep(0)
    stream.receive(commit(3, 1, 1))
    with pytest.raises(Unavailable, match="did not begin with DecodeStarted"):
        await opening


async def test_an_idle_stream_reports_that_its_verifier_is_alive_once() -> None:
    stream = await opened()
    for _ in range(3):
        stream.receive(None)
    assert isinstance(await stream.next(), DecodeIdle)
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        ({"position": 1, "ranks": [1] * 1025, "epoch": 1}, "more than 1024 log-probabilities beyond the acknowledged"),
        ({"position": 1, "ranks": [1], "epoch": 2}, "under epoch 2, not 1"),
    ],
)
async def test_log_probabilities_that_nobody_asked_for_end_the_stream(scores: dict[str, Any], why: str) -> None:
    worker = Worker("verifier-1", "verifier", "nowhere", "target", b"digest", 4096, 64, 1, 0, 0)
    asked = replace(start("a"), tokens=(1,) * 2000, answer_position=2000, scored=1)
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        link = VerifierLink(worker, channel, lease_s=10.0)
        stream = DecodeStream(worker, link, asked)
        stream.receive(verifier_pb2.DecodeStarted())
        stream.receive(verifier_pb2.PromptScores(position=1, ranks=[1] * 1024, epoch=1))
        await stream.next()
        stream.receive(verifier_pb2.PromptScores(**scores))
        with pytest.raises(Unavailable, match=why):
            await stream.next()
        await link.close()
