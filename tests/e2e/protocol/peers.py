"""Peers of a verifier that a test plays by hand, over real gRPC: a drafter, and a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc.aio

from outrider.core.session.contract import Contract, SentTerms
from outrider.core.session.digest import EMPTY, extend
from outrider.rpc.channels import LIVENESS, Options, open_channel
from outrider.rpc.liveness import HEARTBEAT_S
from outrider.rpc.status import CLASS_KEY, FIELD_KEY, RETRY_KEY, code_of, error_from_pb
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2, verifier_pb2
from outrider.v1.drafter_pb2_grpc import TreeSinkStub
from outrider.v1.verifier_pb2_grpc import VerifierStub
from outrider.wire.types import contract_to_pb, plan_to_pb
from tests.e2e.mini_router import SPECULATE, described, ticket
from tests.e2e.protocol.stream_probe import WITHIN_S, End, Inbox, new_name, with_heartbeats


class RawDrafter:
    """A drafter's stream. Sends heartbeats by itself while `beats`, and nothing else."""

    def __init__(self, upstream: str, name: str) -> None:
        self.name = name
        self.beats = True
        self.inbox = Inbox("frame")
        self.reads = asyncio.Event()  # whether it reads what it is sent
        self.reads.set()
        self._upstream = upstream
        self._attachments = 0
        self._outgoing: asyncio.Queue[pb.DraftUp | None] = asyncio.Queue()

    def send_frame(self, **frame: Any) -> None:
        """Sends a DraftUp with this frame, or an empty one."""
        self._outgoing.put_nowait(pb.DraftUp(**frame))

    def finish(self) -> None:
        """Closes its side."""
        self._outgoing.put_nowait(None)

    async def subscribe(
        self,
        session: str,
        *,
        epoch: int = 1,
        attachment: int | None = None,
        signed: bytes | None = None,
        features: bytes = b"",
    ) -> int:
        """Sends a subscription, with a good ticket unless one is given; returns its attachment."""
        if attachment is None:
            attachment = self._attachments + 1
        self._attachments = max(self._attachments, attachment)
        if signed is None:
            signed = await ticket(self._upstream, session, self.name, epoch)
        self.send_frame(
            subscribe=pb.Subscribe(
                session_id=session, epoch=epoch, attachment=attachment, ticket=signed, features=features
            )
        )
        return attachment

    async def attach(self, session: str, *, epoch: int = 1) -> pb.Snapshot:
        """Subscribes, and waits for the snapshot."""
        attachment = await self.subscribe(session, epoch=epoch)
        return await self.inbox.take("snapshot", attachment)

    async def committed(self) -> pb.Commit:
        """The next commit that has tokens; one without may come before it, which means that the step has begun."""
        while not (commit := await self.inbox.take("commit")).tokens:
            assert not commit.dropped
        return commit

    async def received_all(self, session: str) -> None:
        """Waits until all that it sent is dealt with: the frame behind it is refused, which counts as one refusal."""
        attachment = await self.subscribe(session, signed=b"none")
        await self.inbox.take("closed", attachment)

    async def run(self, channel: grpc.aio.Channel) -> None:
        heartbeat = pb.DraftUp(heartbeat=types_pb2.Heartbeat())
        call = TreeSinkStub(channel).Draft(with_heartbeats(self._outgoing, heartbeat, HEARTBEAT_S, lambda: self.beats))
        try:
            await self.inbox.fill(self._while_reading(call))
        finally:
            call.cancel()

    async def _while_reading(self, call: Any) -> AsyncIterator[Any]:
        frames = aiter(call)
        while True:
            await self.reads.wait()
            try:
                yield await anext(frames)
            except StopAsyncIteration:
                return


@asynccontextmanager
async def drafting(
    upstream: str, name: str = "", *, greets: bool = True, options: Options = ()
) -> AsyncIterator[RawDrafter]:
    """A drafter's stream to an upstream, welcomed already unless it is not to greet.

    Without a name it is a new one, of which the upstream remembers nothing.
    """
    drafter = RawDrafter(upstream, name or new_name("drafter"))
    async with grpc.aio.insecure_channel(upstream, options=(*LIVENESS, *options)) as channel:
        running = asyncio.create_task(drafter.run(channel))
        try:
            if greets:
                drafter.send_frame(hello=await hello_to(upstream, drafter.name))
                await drafter.inbox.take("welcome")
            yield drafter
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def hello_to(verifier: str, name: str, **changes: Any) -> pb.Hello:
    """A good Hello, with changes."""
    there = await described(verifier)
    fields = {"drafter_id": name, "tokenizer_digest": there.tokenizer_digest, "vocabulary": there.vocabulary}
    return pb.Hello(**(fields | changes))


def subscribed(tokens: Sequence[int], fused: Any = None) -> Any:
    """As much of a subscription, and of its session, as its snapshot is made of; with features where they are given."""
    session = SimpleNamespace(
        answer_position=7,
        vocabulary=4096,
        unpadded_vocabulary=4000,
        tokens=tokens,
        tree=SimpleNamespace(digest=extend(EMPTY, tokens)),
        epoch=7,
        contract=Contract(seed=5, max_tokens=9),
        terms=SimpleNamespace(plan=SPECULATE, sent=SentTerms(0.25, 7.0, True)),
        ceilings=SPECULATE,
        wire_bytes=0,
        grant=lambda _: 512,
        fused=fused,
    )
    return SimpleNamespace(session=session, attachment=3, plan_version=-1, wants_features=fused is not None)


def delta(
    text: Sequence[int], root: int, tokens: Sequence[int], *, first_id: int = 1, **changes: Any
) -> dict[str, pb.TreeDelta]:
    """A chain of nodes below position `root` of a text, each drafted as certain; as keywords of `send_frame`."""
    fields: dict[str, Any] = {
        "attachment": 1,
        "epoch": 1,
        "root_position": root,
        "root_digest": extend(EMPTY, text[: root + 1]),
        "first_id": first_id,
        "parents": [0] + [1] * (len(tokens) - 1) if tokens else [],
        "tokens": tokens,
        "edges": bytes(len(tokens)),
        "plan_version": 1,
    }
    return {"delta": pb.TreeDelta(**(fields | changes))}


async def start_of(verifier: str, **changes: Any) -> verifier_pb2.DecodeStart:
    """A good start, with changes."""
    there = await described(verifier)
    tokens = changes.get("tokens", [259, 361, 1085])
    fields: dict[str, Any] = {
        "session_id": new_name(),
        "epoch": 1,
        "model": there.model,
        "tokenizer_digest": there.tokenizer_digest,
        "tokens": tokens,
        "digest": extend(EMPTY, tokens),
        "answer_position": len(tokens),
        "contract": contract_to_pb(Contract(seed=1, max_tokens=4)),
        "plan": plan_to_pb(SPECULATE),
        "window": 64,
        "lease_ms": 10_000,
        "handle": 1,
    }
    return verifier_pb2.DecodeStart(**(fields | changes))


class GenerationInbox(Inbox):
    """What came on a Decode stream: "started", "commit", "finished" and "heartbeat". An error is the end."""

    def put(self, frame: verifier_pb2.DecodeResponse) -> None:
        for started in frame.started:
            self.add("started", started)
        for commit in frame.commits:
            self.add("commit", commit)
        for ended in frame.ended:
            if ended.WhichOneof("how") == "reason":
                self.add("finished", ended)
            else:
                error = error_from_pb(ended.error)
                known = {
                    CLASS_KEY: ended.error.kind,
                    FIELD_KEY: ended.error.field,
                    RETRY_KEY: str(ended.error.retry_after_ms),
                }
                self.close(End(code_of(error), str(error), known))
        if frame.HasField("heartbeat"):
            self.add("heartbeat", frame.heartbeat)


class RawRouter:
    """A Decode stream with one generation. Sends heartbeats by itself while `beats`, and nothing else."""

    def __init__(self, start: verifier_pb2.DecodeStart | None) -> None:
        self.start = start or verifier_pb2.DecodeStart()
        self.durable = len(self.start.tokens)
        self.beats = True
        self.inbox = GenerationInbox()
        self._outgoing: asyncio.Queue[verifier_pb2.DecodeRequest | None] = asyncio.Queue()
        if start is not None:
            self.send_frame(start=start)

    @property
    def session(self) -> str:
        return self.start.session_id

    @property
    def tokens(self) -> list[int]:
        """All that is committed, prompt included."""
        return [*self.start.tokens, *(token for commit in self.inbox.of("commit") for token in commit.tokens)]

    @property
    def reports(self) -> list[types_pb2.StepReport]:
        return [commit.report for commit in self.inbox.of("commit")]

    def send_frame(
        self,
        start: verifier_pb2.DecodeStart | None = None,
        durable: int | None = None,
        plan: types_pb2.Plan | None = None,
        *,
        cancel: bool = False,
    ) -> None:
        """Sends a DecodeRequest about the generation, or an empty one."""
        handle = self.start.handle
        request = verifier_pb2.DecodeRequest(start=start)
        if durable is not None:
            self.durable = max(self.durable, durable)
            request.acknowledged.append(handle)
            request.durable.append(durable)
        if plan is not None:
            request.plans.add(handle=handle, plan=plan)
        if cancel:
            request.cancelled.append(handle)
        self.send(request)

    def send(self, request: verifier_pb2.DecodeRequest) -> None:
        """Sends a message."""
        self._outgoing.put_nowait(request)

    def finish(self) -> None:
        """Closes its side."""
        self._outgoing.put_nowait(None)

    async def generated(self, count: int) -> list[int]:
        """The answer, once it has `count` tokens."""
        length = len(self.start.tokens) + count
        await self.inbox.until(lambda: len(self.tokens) >= length)
        return self.tokens[len(self.start.tokens) :]

    async def full(self) -> None:
        """Waits until the window is full: the verifier has nothing to do here."""
        await self.inbox.until(lambda: len(self.tokens) == self.durable + self.start.window)

    async def step(self) -> types_pb2.StepReport:
        """How the step goes that follows when all of a full window is acknowledged. Leaves the window full again.

        A step takes at least the best node, if the window has room for it; how many more depends on what they cost on
        the machine.
        """
        await self.full()
        before = len(self.reports)
        self.send_frame(durable=len(self.tokens))
        await self.full()
        return self.reports[before]

    async def acknowledge(self, count: int) -> None:
        """Reports that `count` tokens of the answer are durable, once they are there."""
        await self.generated(count)
        self.send_frame(durable=len(self.start.tokens) + count)

    async def run(self, channel: grpc.aio.Channel) -> None:
        heartbeat = verifier_pb2.DecodeRequest()
        every_s = (self.start.lease_ms or 400) / 4000
        call = VerifierStub(channel).Decode(with_heartbeats(self._outgoing, heartbeat, every_s, lambda: self.beats))
        try:
            await self.inbox.fill(call)
        finally:
            call.cancel()


@asynccontextmanager
async def decoding(verifier: str, **changes: Any) -> AsyncIterator[RawRouter]:
    """A generation that has a place. It commits as far as its window allows and then waits for acknowledgements."""
    async with calling(verifier, await start_of(verifier, **changes)) as router:
        await router.inbox.until(lambda: bool(router.inbox.of("started")))
        yield router


@asynccontextmanager
async def calling(verifier: str, start: verifier_pb2.DecodeStart | None = None) -> AsyncIterator[RawRouter]:
    """A Decode call that begins with this start, whatever becomes of it."""
    router = RawRouter(start)
    async with open_channel(verifier) as channel:
        running = asyncio.create_task(router.run(channel))
        try:
            yield router
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def idle(verifier: str) -> verifier_pb2.VerifierDescription:
    """The verifier, once it has no session any more."""
    async with asyncio.timeout(WITHIN_S):
        while (there := await described(verifier)).sessions:
            await asyncio.sleep(0.01)
    return there
