"""A peer that drafts random trees with boastful scores, over the real wire."""

import asyncio
import random
from collections.abc import AsyncIterator

from outrider.core.tree.delta import Delta
from outrider.rpc.channels import open_channel
from outrider.rpc.liveness import HEARTBEAT_S
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.drafter_pb2_grpc import TreeSinkStub
from outrider.v1.verifier_pb2_grpc import VerifierStub
from outrider.wire.codec import delta_to_pb
from tests.e2e.mini_router import ticket

VOCABULARY = 4096


class Adversary:
    """Subscribes to one session and answers every commit with a random tree. `sent` counts its nodes."""

    def __init__(self, verifier: str, session: str, seed: int) -> None:
        self.sent = 0
        self._verifier = verifier
        self._session = session
        self._random = random.Random(seed)
        self._outgoing: asyncio.Queue[pb.DraftUp] = asyncio.Queue()

    async def run(self) -> None:
        """Drafts until the session is closed."""
        async with open_channel(self._verifier) as channel:
            described = await VerifierStub(channel).Describe(types_pb2.DescribeRequest())
            hello = pb.Hello(
                drafter_id="adversary", tokenizer_digest=described.tokenizer_digest, vocabulary=described.vocabulary
            )
            self._outgoing.put_nowait(pb.DraftUp(hello=hello))
            signed = await ticket(self._verifier, self._session, "adversary")
            subscribe = pb.Subscribe(session_id=self._session, epoch=1, attachment=1, ticket=signed)
            self._outgoing.put_nowait(pb.DraftUp(subscribe=subscribe))
            call = TreeSinkStub(channel).Draft(self._requests())
            tokens = 0
            async for frame in call:
                kind = frame.WhichOneof("frame")
                if kind == "snapshot":
                    tokens = len(frame.snapshot.tokens)
                    self._boast(tokens - 1, frame.snapshot.digest, frame.snapshot.credit)
                elif kind == "commit":
                    tokens = frame.commit.position + len(frame.commit.tokens)
                    self._boast(tokens - 1, frame.commit.digest, frame.commit.credit)
                elif kind == "closed":
                    call.cancel()
                    return

    async def _requests(self) -> AsyncIterator[pb.DraftUp]:
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    frame = await self._outgoing.get()
            except TimeoutError:
                frame = pb.DraftUp(heartbeat=types_pb2.Heartbeat())
            yield frame

    def _boast(self, root: int, digest: int, credit: int) -> None:
        first = self.sent + 1
        count = min(self._random.randint(1, 12), credit - self.sent)
        if count < 1:
            return
        delta = Delta(
            root_position=root,
            root_digest=digest,
            first_id=first,
            parents=tuple(
                self._random.choice([0, *range(first, identity)]) for identity in range(first, first + count)
            ),
            tokens=tuple(self._random.randrange(VOCABULARY) for _ in range(count)),
            edges=(-1 / 16,) * count,
        )
        self.sent += count
        message = delta_to_pb(delta, attachment=1, epoch=1, plan_version=1)
        self._outgoing.put_nowait(pb.DraftUp(delta=message))
