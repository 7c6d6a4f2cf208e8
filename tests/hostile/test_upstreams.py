"""Whatever an upstream does, a drafter goes on: bytes that are no message, and attachments that come at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from drafter_svc.server import run as run_drafter
from drafter_svc.upstreams import outgoing, upstream, upstream_pool
from outrider.rpc.channels import open_channel
from outrider.rpc.server import serving as serving_grpc
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.drafter_pb2_grpc import DrafterStub, add_TreeSinkServicer_to_server
from tests.e2e.protocol.upstreams import RawUpstream
from tests.engine.small_checkpoints import make_checkpoint
from tests.hostile.rig import PROMPT, drafter_config, serving

GARBAGE = b"\xff\xff\xff\xff"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


class Garbler:
    """An upstream whose first streams send bytes that are no message; the later ones are those of a raw upstream."""

    def __init__(self, raw: RawUpstream, garbled: int) -> None:
        self.garbled = garbled
        self._raw = raw

    async def draft(self, requests: AsyncIterator[Any], context: Any) -> None:
        if not self.garbled:
            await self._raw.Draft(requests, _Writing(context))
            return
        self.garbled -= 1
        await context.write(GARBAGE)
        async for _ in requests:
            pass


class _Writing:
    """A context that serializes, for a handler without a serializer."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def write(self, message: pb.DraftDown) -> None:
        await self._context.write(message.SerializeToString())


@asynccontextmanager
async def served(register: Callable[[grpc.aio.Server], list[str]]) -> AsyncIterator[str]:
    async with serving_grpc("127.0.0.1:0", register, drain_s=0) as address:
        yield address


def raw(garbler: Garbler) -> Callable[[grpc.aio.Server], list[str]]:
    handler = grpc.stream_stream_rpc_method_handler(garbler.draft, pb.DraftUp.FromString, None)

    def register(server: grpc.aio.Server) -> list[str]:
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("outrider.v1.TreeSink", {"Draft": handler}),)
        )
        return []

    return register


async def test_malformed_bytes_are_counted_and_the_stream_restarts(checkpoint: Path, redis_url: str) -> None:
    behind = RawUpstream()
    garbler = Garbler(behind, garbled=2)
    async with (
        serving(run_drafter, drafter_config(checkpoint), redis_url) as address,
        served(raw(garbler)) as lies,
        open_channel(address) as channel,
    ):
        stub = DrafterStub(channel)
        await stub.Attach(pb.AttachRequest(session_id="s", epoch=1, upstream=lies))
        stream = await behind.stream()
        subscribed = await stream.inbox.take("subscribe")
        stream.snapshot(PROMPT, attachment=subscribed.attachment)
        delta = await stream.inbox.take("delta")
        assert delta.attachment == subscribed.attachment
        description = await stub.Describe(types_pb2.DescribeRequest())
        assert description.refused_frames == 2
        assert description.sessions == 1
        await stub.Detach(pb.DetachRequest(session_id="s", epoch=1))


async def test_attachments_during_the_end_of_an_idle_stream_share_one_new_stream(
    checkpoint: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = upstream.Upstream.close

    async def slowly(one: upstream.Upstream) -> None:  # as a connection may end
        await asyncio.sleep(0.2)
        await close(one)

    monkeypatch.setattr(upstream.Upstream, "close", slowly)
    monkeypatch.setattr(upstream_pool, "IDLE_S", 0.0)
    first, second = RawUpstream(), RawUpstream()

    def of(one: RawUpstream) -> Callable[[grpc.aio.Server], list[str]]:
        def register(server: grpc.aio.Server) -> list[str]:
            add_TreeSinkServicer_to_server(one, server)
            return []

        return register

    async with (
        serving(run_drafter, drafter_config(checkpoint), redis_url) as address,
        served(of(first)) as idle,
        served(of(second)) as busy,
        open_channel(address) as channel,
    ):
        stub = DrafterStub(channel)
        await stub.Attach(pb.AttachRequest(session_id="kept", epoch=1, upstream=busy))
        await stub.Attach(pb.AttachRequest(session_id="gone", epoch=1, upstream=idle))
        stream = await second.stream()
        await stream.inbox.take("subscribe")
        await (await first.stream()).inbox.take("subscribe")
        await stub.Detach(pb.DetachRequest(session_id="gone", epoch=1))
        request = pb.AttachRequest(session_id="new", epoch=1, upstream=busy)
        await asyncio.gather(*(stub.Attach(request) for _ in range(8)))
        subscribed = await stream.inbox.take("subscribe")
        stream.snapshot(PROMPT, attachment=subscribed.attachment)
        assert (await stream.inbox.take("delta")).attachment == subscribed.attachment
        assert not stream.inbox.of("subscribe")
        assert (await stub.Describe(types_pb2.DescribeRequest())).sessions == 1
        await stub.Detach(pb.DetachRequest(session_id="new", epoch=1))
        assert (await stub.Describe(types_pb2.DescribeRequest())).sessions == 0


class Deaf(RawUpstream):
    """An upstream that keeps the stream open and reads nothing."""

    async def Draft(self, requests: AsyncIterator[pb.DraftUp], context: Any) -> None:
        self.streams.append(None)  # type: ignore[arg-type]
        await asyncio.Event().wait()


async def test_frames_that_an_upstream_does_not_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than may wait ends the stream, which begins anew with what is attached by then."""
    monkeypatch.setattr(outgoing, "OUTGOING_FRAMES", 8)
    monkeypatch.setattr(upstream, "RETRY_S", 0.01)
    deaf = Deaf()

    def register(server: grpc.aio.Server) -> list[str]:
        add_TreeSinkServicer_to_server(deaf, server)
        return []

    class Sink:
        closed_: int = 0

        def closed(self, key: Any) -> None:
            self.closed_ += 1

    sink = Sink()
    async with served(register) as address:
        one = upstream.Upstream(address, pb.Hello(drafter_id="d" * 2**16, vocabulary=131), sink, lambda: None)  # type: ignore[arg-type]
        kept = upstream.Attachment("kept", "", 1, b"t" * 2**16)
        one.attach(kept)
        async with asyncio.timeout(10):
            while len(deaf.streams) < 3:
                for number in range(4):  # of 64 kB each, which flow control holds back soon
                    one.attach(attachment := upstream.Attachment(f"s{number}", "", 1, b"t" * 2**16))
                    one.detach(attachment)
                assert len(one._outgoing) <= 8
                await asyncio.sleep(0.005)
        why = one.refusals.attach_response(kept.key)
        await one.close()
    assert why.refused.startswith("does not read what it is sent")
    assert sink.closed_ >= 2
