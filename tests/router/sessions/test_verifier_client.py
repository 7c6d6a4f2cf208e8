"""The router's end of a generation on a verifier, against a verifier on real gRPC."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from outrider.core.session.contract import OFF, Contract
from outrider.rpc.server import serving
from outrider.store.registry import Worker
from outrider.v1.verifier_pb2_grpc import add_VerifierServicer_to_server
from router.sessions.verifier_client import DecodeStart, DecodeStream
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
async def test_a_stream_that_is_cancelled_while_it_opens_ends_at_once(steps: int) -> None:
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
