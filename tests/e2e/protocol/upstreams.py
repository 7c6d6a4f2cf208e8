"""A drafter's peer that a test plays by hand, over real gRPC: an upstream to which a real drafter is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import grpc
import grpc.aio

from outrider.core.session.contract import Contract
from outrider.core.session.digest import EMPTY, extend
from outrider.rpc.channels import open_channel
from outrider.rpc.liveness import HEARTBEAT_S
from outrider.rpc.server import serving
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.drafter_pb2_grpc import DrafterStub, TreeSinkServicer, add_TreeSinkServicer_to_server
from outrider.wire.types import contract_to_pb, plan_to_pb
from tests.e2e.mini_router import SPECULATE
from tests.e2e.protocol.stream_probe import WITHIN_S, End, Inbox, new_name, with_heartbeats

_known: set[str] = set()  # where drafters have been: there they would go on to number their subscriptions


class Stream:
    """What one drafter sent on one Draft stream, and what it is sent. Greets and sends heartbeats by itself."""

    def __init__(self) -> None:
        self.inbox = Inbox("frame")
        self.beats = True
        self.outgoing: asyncio.Queue[pb.DraftDown | None] = asyncio.Queue()

    def send_frame(self, **frame: Any) -> None:
        """Sends a DraftDown with this frame."""
        self.outgoing.put_nowait(pb.DraftDown(**frame))

    def snapshot(self, tokens: Sequence[int], **changes: Any) -> None:
        """Sends all committed tokens and good terms, with changes; the credit is large and min_path_score 0."""
        fields: dict[str, Any] = {
            "attachment": 1,
            "epoch": 1,
            "position": 0,
            "tokens": tokens,
            "last": True,
            "digest": extend(EMPTY, tokens),
            "contract": contract_to_pb(Contract(seed=1, max_tokens=500, temperature=0.0)),
            "plan": plan_to_pb(SPECULATE),
            "credit": 512,
        }
        self.send_frame(snapshot=pb.Snapshot(**(fields | changes)))

    def commit(self, text: Sequence[int], position: int, **changes: Any) -> None:
        """Sends that `text` is committed from `position` on, with changes."""
        fields: dict[str, Any] = {
            "attachment": 1,
            "epoch": 1,
            "position": position,
            "tokens": text[position:],
            "digest": extend(EMPTY, text),
            "credit": 512,
        }
        self.send_frame(commit=pb.Commit(**(fields | changes)))


class RawUpstream(TreeSinkServicer):
    """A TreeSink that only those drafters know which are sent to it."""

    def __init__(self) -> None:
        self.address = ""
        self.streams: list[Stream] = []

    async def Draft(self, requests: AsyncIterator[pb.DraftUp], context: Any) -> None:
        """One drafter's stream."""
        stream = Stream()
        self.streams.append(stream)
        stream.send_frame(welcome=pb.Welcome(upstream_id="raw-upstream"))
        reading = asyncio.create_task(stream.inbox.fill(requests))
        heartbeat = pb.DraftDown(heartbeat=types_pb2.Heartbeat())
        try:
            async for frame in with_heartbeats(stream.outgoing, heartbeat, HEARTBEAT_S, lambda: stream.beats):
                await context.write(frame)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            stream.inbox.close(End(grpc.StatusCode.CANCELLED, "the drafter has gone", {}))

    async def stream(self, number: int = 0, within_s: float = WITHIN_S) -> Stream:
        """The stream of that number, once it is there."""
        async with asyncio.timeout(within_s):
            while len(self.streams) <= number:
                await asyncio.sleep(0.01)
        return self.streams[number]


class Attached(NamedTuple):
    """A real drafter that drafts for a raw upstream."""

    drafter: DrafterStub
    upstream: RawUpstream
    stream: Stream  # the first one; its subscription was taken
    subscribed: pb.Subscribe


@asynccontextmanager
async def upstream_of(drafter: str) -> AsyncIterator[Attached]:
    """An upstream to which a real drafter is sent for a session of its own."""
    upstream = RawUpstream()

    def register(server: grpc.aio.Server) -> list[str]:
        add_TreeSinkServicer_to_server(upstream, server)
        return []

    async with AsyncExitStack() as stack:
        while not upstream.address or upstream.address in _known:
            upstream.address = await stack.enter_async_context(serving("127.0.0.1:0", register, drain_s=0))
        _known.add(upstream.address)
        stub = DrafterStub(await stack.enter_async_context(open_channel(drafter)))
        session = new_name()
        await stub.Attach(pb.AttachRequest(session_id=session, epoch=1, upstream=upstream.address, ticket=b"a ticket"))
        stream = await upstream.stream()
        yield Attached(stub, upstream, stream, await stream.inbox.take("subscribe"))
        await stub.Detach(pb.DetachRequest(session_id=session, epoch=2**60))


async def refused_by(drafter: DrafterStub) -> int:
    """Frames that a drafter has refused."""
    return int((await drafter.Describe(types_pb2.DescribeRequest())).refused_frames)


class Copy:
    """A tree as an upstream holds it that accepts all that it receives, for one attachment under one root."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}  # by id
        self.tokens: dict[int, int] = {}
        self.scores: dict[int, float] = {0: 0.0}  # sums of edges' codes from the root

    def take(self, frame: pb.TreeDelta) -> list[int]:
        """Takes a delta; returns its ids. Fails when it names a parent that was not sent."""
        identities = list(range(frame.first_id, frame.first_id + len(frame.tokens)))
        for identity, distance, token, code in zip(identities, frame.parents, frame.tokens, frame.edges, strict=True):
            parent = identity - distance if distance else 0
            self.parents[identity], self.tokens[identity] = parent, token
            self.scores[identity] = self.scores[parent] + code
        return identities

    def depth(self, identity: int) -> int:
        return 1 + self.depth(self.parents[identity]) if identity else 0
