"""The TreeSink service: drafters' trees in; snapshots, commits, plans, prices and credit out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from outrider.core.tree import Drifted
from outrider.errors import InvalidRequest, OutriderError, TokenizerMismatch
from outrider.rpc.codec import delta_from_pb, plan_to_pb
from outrider.rpc.status import translated
from outrider.v1 import drafter_pb2 as pb
from outrider.v1.drafter_pb2_grpc import TreeSinkServicer
from verifier_svc.loop import StepLoop
from verifier_svc.session import Commit, Session, Subscription
from verifier_svc.stream import DraftStream

log = logging.getLogger(__name__)

WAITING_SUBSCRIPTIONS = 1024  # that came before their session
PATIENCE_S = 5.0  # how long one may wait
LAST_WRITE_S = 1.0  # for a write that is under way when a stream ends


class Sink(TreeSinkServicer):
    """Grafts what drafters send onto their sessions' trees, and tells them what was committed."""

    def __init__(self, worker_id: str, tokenizer_digest: bytes, vocabulary: int) -> None:
        self.streams = 0
        self.refused = 0
        self._worker_id = worker_id
        self._tokenizer_digest = tokenizer_digest
        self._vocabulary = vocabulary
        self._waiting: dict[tuple[DraftStream, str], pb.Subscribe] = {}
        self._loop: StepLoop

    def serve(self, loop: StepLoop) -> None:
        """Takes the sessions from `loop`. Called once, before the first stream."""
        self._loop = loop

    async def Draft(self, requests: AsyncIterator[pb.DraftUp], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """One drafter's stream, for as long as it lives."""
        async with translated(context):
            stream = await self._greet(requests)
            reading = asyncio.create_task(self._read(stream, requests))
            writing = asyncio.create_task(self._write(stream, context))
            self.streams += 1
            try:
                await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    reading.result()
            finally:
                self.streams -= 1
                self._forget(stream)
                reading.cancel()
                stream.end()  # gRPC cannot send the status of a call while a write is under way
                await asyncio.wait({writing}, timeout=LAST_WRITE_S)
                writing.cancel()
                await asyncio.gather(reading, writing, return_exceptions=True)

    def welcome_waiting(self, session: Session) -> None:
        """A session opened: subscribes the drafters that were there before it."""
        for (stream, session_id), subscribe in list(self._waiting.items()):
            if session_id == session.id:
                del self._waiting[stream, session_id]
                self._subscribe(stream, subscribe)

    def refresh(self, session: Session) -> None:
        """The plan or the credit changed without a commit."""
        for subscription in session.subscriptions.values():
            self._tell(session, subscription, pb.Commit(position=len(session.tokens)))

    def publish(self, session: Session, commit: Commit, price: float) -> None:
        """Tells a session's drafters what was committed."""
        session.price = price
        tokens = [choice.token for choice in commit.choices]
        for subscription in session.subscriptions.values():
            self._tell(session, subscription, pb.Commit(position=commit.position, tokens=tokens))

    def _tell(self, session: Session, subscription: Subscription, commit: pb.Commit) -> None:
        commit.session_id = session.id
        commit.epoch = session.epoch
        commit.attachment = subscription.attachment
        commit.digest = session.tree.digest
        commit.price = session.price
        commit.credit = session.credit(subscription)
        if subscription.plan_version != session.plan.version:
            commit.plan.CopyFrom(plan_to_pb(session.ceilings))
            subscription.plan_version = session.plan.version
        session.wire_bytes += commit.ByteSize()
        if not subscription.stream.commit(commit):
            self._snapshot(session, subscription)

    def _snapshot(self, session: Session, subscription: Subscription) -> None:
        subscription.plan_version = session.plan.version
        subscription.stream.snapshot(
            session_id=session.id,
            epoch=session.epoch,
            attachment=subscription.attachment,
            tokens=session.tokens,
            digest=session.tree.digest,
            contract=session.contract,
            plan=session.ceilings,
            credit=session.credit(subscription),
        )

    async def _greet(self, requests: AsyncIterator[pb.DraftUp]) -> DraftStream:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("frame") != "hello":
            raise InvalidRequest("hello", "must be the first frame of Draft")
        hello = first.hello
        if hello.tokenizer_digest != self._tokenizer_digest or hello.vocabulary != self._vocabulary:
            raise TokenizerMismatch(
                f"tokenizer_digest: drafter '{hello.drafter_id}' uses another tokenizer or vocabulary "
                f"({hello.vocabulary} tokens) than this verifier's model ({self._vocabulary} tokens); "
                "draft with a model of the same family"
            )
        stream = DraftStream(hello.drafter_id)
        stream.say(pb.DraftDown(welcome=pb.Welcome(upstream_id=self._worker_id)))
        return stream

    async def _read(self, stream: DraftStream, requests: AsyncIterator[pb.DraftUp]) -> None:
        async for frame in requests:
            kind = frame.WhichOneof("frame")
            if kind == "delta":
                self._graft(stream, frame.delta)
            elif kind == "subscribe":
                self._subscribe(stream, frame.subscribe)
            elif kind == "unsubscribe":
                self._unsubscribe(stream, frame.unsubscribe)
            elif kind != "heartbeat":
                raise InvalidRequest("frame", f"'{kind}' is not allowed here")

    async def _write(self, stream: DraftStream, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while (frames := await stream.next()) is not None:
            for frame in frames:
                await context.write(frame)

    def _subscribe(self, stream: DraftStream, subscribe: pb.Subscribe) -> None:
        session = self._loop.sessions.get(subscribe.session_id)
        if session is None:
            self._wait(stream, subscribe)
        elif subscribe.epoch != session.epoch:
            stream.close(session.id, subscribe.attachment, "fenced")
        else:
            subscription = session.subscribe(stream, subscribe.attachment)
            self._snapshot(session, subscription)

    def _wait(self, stream: DraftStream, subscribe: pb.Subscribe) -> None:
        key = (stream, subscribe.session_id)
        if len(self._waiting) >= WAITING_SUBSCRIPTIONS:
            stream.close(subscribe.session_id, subscribe.attachment, "too many subscriptions wait for their session")
            return
        self._waiting[key] = subscribe
        asyncio.get_running_loop().call_later(PATIENCE_S, self._expire, key, subscribe)

    def _expire(self, key: tuple[DraftStream, str], subscribe: pb.Subscribe) -> None:
        if self._waiting.get(key) is subscribe:
            del self._waiting[key]
            key[0].close(subscribe.session_id, subscribe.attachment, "unknown session")

    def _unsubscribe(self, stream: DraftStream, unsubscribe: pb.Unsubscribe) -> None:
        self._waiting.pop((stream, unsubscribe.session_id), None)
        session = self._loop.sessions.get(unsubscribe.session_id)
        subscription = session.subscriptions.get(stream) if session else None
        if session and subscription and subscription.attachment == unsubscribe.attachment:
            session.unsubscribe(stream)
            self._loop.wake()

    def _graft(self, stream: DraftStream, message: pb.TreeDelta) -> None:
        """Adds a delta to its session's tree. What is wrong with it costs that session its drafter, no more."""
        session = self._loop.sessions.get(message.session_id)
        subscription = session.subscriptions.get(stream) if session else None
        if (
            session is None
            or subscription is None
            or subscription.attachment != message.attachment
            or session.epoch != message.epoch
        ):
            self.refused += 1  # it was on its way when the session ended or changed hands
            return
        session.wire_bytes += message.ByteSize()
        try:
            delta = delta_from_pb(message, self._vocabulary)
            dropped = session.graft(subscription, delta, time.monotonic(), passing=self._loop.passing)
        except Drifted:
            self.refused += 1
            self._snapshot(session, subscription)
            return
        except OutriderError as error:
            self.refused += 1
            log.warning("drafter %s is detached from a session: %s", stream.drafter_id, error)
            session.unsubscribe(stream)
            stream.close(session.id, message.attachment, f"malformed: {error}")
            return
        if message.exhausted:
            subscription.exhausted = message.root_position
        if dropped:
            commit = pb.Commit(position=len(session.tokens), dropped=dropped)
            self._tell(session, subscription, commit)
        self._loop.wake()

    def _forget(self, stream: DraftStream) -> None:
        for key in [key for key in self._waiting if key[0] is stream]:
            del self._waiting[key]
        for session in self._loop.sessions.values():
            session.unsubscribe(stream)
        self._loop.wake()
