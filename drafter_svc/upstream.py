"""The stream to one upstream: all sessions drafted for it, multiplexed; reconnected while any is attached."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

import grpc.aio

from drafter_svc.refusals import WITHOUT, Refusals
from drafter_svc.replica import Snapshot, Update
from drafter_svc.told import NO_FEATURES, Parts, Wanted, update_from_pb
from outrider.core.tree import Delta, Hints
from outrider.errors import OutriderError, Overloaded
from outrider.rpc import liveness
from outrider.rpc.channels import open_channel
from outrider.rpc.codec import delta_to_pb, hints_from_pb
from outrider.rpc.lifecycle import alongside
from outrider.rpc.status import from_rpc_error
from outrider.rpc.supervision import kept
from outrider.rpc.tls import SERVER, Tls
from outrider.v1 import drafter_pb2 as pb
from outrider.v1.drafter_pb2_grpc import TreeSinkStub

log = logging.getLogger(__name__)

OUTGOING_FRAMES = 4096  # that may wait to be written; an upstream that reads leaves a handful
RETRY_S = 0.2  # between two attempts to reach an upstream
MOST_RENEWALS = 16  # subscriptions anew of an attachment within RENEWALS_S; one more, and it ends
RENEWALS_S = 10.0


class Listener(Protocol):
    """Hears what an upstream says of a session."""

    def opened(self, key: Attachment, snapshot: Snapshot) -> None:
        """The committed tokens and the terms: start to draft, or start anew."""

    def updated(self, key: Attachment, update: Update | Hints) -> None:
        """New committed tokens, new terms, or what an upstream that drafts itself believes."""

    def closed(self, key: Attachment) -> None:
        """Nothing more is wanted for this session until it is opened again."""

    @property
    def progress(self) -> liveness.Progress:
        """How it goes, for heartbeats."""


class Traced(Protocol):
    """Tells of what is drafted for a session."""

    def heard(self) -> None:
        """The upstream has said something: from here on is drafted for that."""

    def drafted(self, delta: Delta, *, exhausted: bool) -> Delta:
        """What is sent, under the span that tells of it."""

    def ended(self) -> None:
        """Nothing more is drafted for it."""


@dataclass(eq=False, slots=True)
class Attachment:
    """One session drafted for one upstream."""

    session_id: str
    tenant: str
    epoch: int
    ticket: bytes
    number: int = 0  # of the last subscription
    parts: Parts = field(default_factory=Parts)
    traced: Traced | None = None  # where its request is traced
    renewals: int = 0  # since `renewed_s`
    renewed_s: float = 0.0  # of the monotonic clock

    @property
    def key(self) -> tuple[str, int]:
        """Names it among refusals."""
        return self.session_id, self.epoch


class Upstream:
    """The Draft stream to one upstream: opened for the first attachment, and again while there are any.

    When the stream breaks, its sessions are closed for the listener; when it is back they are subscribed anew.
    """

    def __init__(
        self,
        address: str,
        hello: pb.Hello,
        vocabulary: int,
        listener: Listener,
        refuse: Callable[[], None],
        tls: Tls | None = None,
        wanted: Wanted = NO_FEATURES,
    ) -> None:
        self.address = address
        self.attachments: dict[str, Attachment] = {}
        self.refusals = Refusals()
        self._hello = hello
        self._vocabulary = vocabulary
        self._listener = listener
        self._refuse = refuse
        self._tls = tls
        self._features = wanted
        self._said_why = False  # that it cannot be drafted for
        self._outgoing: asyncio.Queue[pb.DraftUp] = asyncio.Queue(OUTGOING_FRAMES)
        self._overrun = asyncio.Event()  # more was to be sent than may wait
        self._numbered: dict[int, Attachment] = {}  # by the number of its subscription
        self._numbers = 0
        self._idle_since = time.monotonic()
        self._open = False
        self._wanted = asyncio.Event()  # there are attachments
        self._task = asyncio.create_task(kept("upstream", self._run))

    @property
    def idle_s(self) -> float:
        """For how long no session has been drafted here."""
        return 0.0 if self.attachments else time.monotonic() - self._idle_since

    def attach(self, attachment: Attachment) -> None:
        """Starts drafting for a session."""
        self.attachments[attachment.session_id] = attachment
        self._wanted.set()
        if self._open:
            self._subscribe(attachment)

    def renew(self, attachment: Attachment, why: str) -> None:
        """Subscribes a session anew whose frames are of no use: the copy is another one than the upstream's, or they
        are malformed. Where that does not help, it is drafted for no more, and the router is told why."""
        now = time.monotonic()
        if now - attachment.renewed_s > RENEWALS_S:
            attachment.renewals, attachment.renewed_s = 0, now
        attachment.renewals += 1
        if attachment.renewals <= MOST_RENEWALS:
            self.attach(attachment)
            return
        reason = f"malformed: {why}"
        log.warning("upstream %s: session %s gets no more drafts: %s", self.address, attachment.session_id, reason)
        self.refusals.closed(attachment.key, reason)
        self.detach(attachment)
        self._listener.closed(attachment)

    def detach(self, attachment: Attachment) -> None:
        """Stops drafting for a session."""
        if self.attachments.get(attachment.session_id) is attachment:
            self._drop(attachment)
            self._say(pb.DraftUp(unsubscribe=pb.Unsubscribe(attachment=attachment.number)))

    def send(self, attachment: Attachment, delta: Delta, plan_version: int, exhausted: bool) -> None:
        """Sends new nodes. The credit that the upstream grants bounds what may wait here."""
        if attachment.traced is not None:
            delta = attachment.traced.drafted(delta, exhausted=exhausted)
        self._say(
            pb.DraftUp(
                delta=delta_to_pb(
                    delta,
                    attachment=attachment.number,
                    epoch=attachment.epoch,
                    plan_version=plan_version,
                    exhausted=exhausted,
                )
            )
        )

    async def close(self) -> None:
        """Ends the stream."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _drop(self, attachment: Attachment) -> None:
        del self.attachments[attachment.session_id]
        self._numbered.pop(attachment.number, None)
        if attachment.traced is not None:
            attachment.traced.ended()
        if not self.attachments:
            self._idle_since = time.monotonic()
            self._wanted.clear()

    def _say(self, frame: pb.DraftUp) -> None:
        if not self._open:
            return
        try:
            self._outgoing.put_nowait(frame)
        except asyncio.QueueFull:
            self._open = False  # nothing may be left out, so that the stream has to begin anew
            self._overrun.set()

    def _subscribe(self, attachment: Attachment) -> None:
        self._numbered.pop(attachment.number, None)
        self._numbers += 1
        attachment.number = self._numbers
        self._numbered[attachment.number] = attachment
        attachment.parts.clear()
        self._say(
            pb.DraftUp(
                subscribe=pb.Subscribe(
                    session_id=attachment.session_id,
                    epoch=attachment.epoch,
                    attachment=attachment.number,
                    ticket=attachment.ticket,
                    features=self._features.digest,
                )
            )
        )

    async def _run(self) -> None:
        reachable = True
        self._tls = self._tls and self._tls.renewed()
        async with open_channel(self.address, self._tls, SERVER) as channel:
            while True:
                await self._wanted.wait()
                try:
                    await self._converse(channel)
                    reachable = True
                except (grpc.aio.AioRpcError, OutriderError) as error:
                    known = from_rpc_error(error) if isinstance(error, grpc.aio.AioRpcError) else error
                    self.refusals.failed(known)
                    if reachable:
                        log.warning("upstream %s: %s", self.address, known)
                    reachable = False
                finally:
                    self._open = False
                    for attachment in self.attachments.values():
                        self._listener.closed(attachment)
                await asyncio.sleep(RETRY_S)

    async def _converse(self, channel: grpc.aio.Channel) -> None:
        self._outgoing, self._overrun = asyncio.Queue(OUTGOING_FRAMES), asyncio.Event()
        self._open = True
        self._say(pb.DraftUp(hello=self._hello))
        for attachment in self.attachments.values():
            self._subscribe(attachment)
        call = TreeSinkStub(channel).Draft()
        try:
            async with alongside() as tasks:  # who fails to write must not go on to read
                beside = [tasks.create_task(self._write(call)), tasks.create_task(self._end_when_overrun())]
                async for frame in liveness.heard(self._frames(call), f"upstream {self.address}"):
                    self._hear(frame)
                for task in beside:
                    task.cancel()
        finally:
            call.cancel()

    async def _frames(self, call: grpc.aio.StreamStreamCall[pb.DraftUp, pb.DraftDown]) -> AsyncIterator[pb.DraftDown]:
        """What comes; bytes that do not parse, which gRPC gives as None, are counted."""
        async for frame in call:
            if frame is None:
                self._refuse()
            yield frame

    async def _end_when_overrun(self) -> None:
        await self._overrun.wait()
        raise Overloaded(f"does not read what it is sent; more than {OUTGOING_FRAMES} frames wait")

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.DraftUp, pb.DraftDown]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader hears why
            while True:
                await call.write(await self._next())

    async def _next(self) -> pb.DraftUp:
        """The next frame, or a heartbeat when there is nothing else to say."""
        try:
            async with asyncio.timeout(liveness.HEARTBEAT_S):
                return await self._outgoing.get()
        except TimeoutError:
            return pb.DraftUp(heartbeat=self._listener.progress.heartbeat())

    def _hear(self, frame: pb.DraftDown) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "heartbeat":
            liveness.check(frame.heartbeat, f"upstream {self.address}")
        if kind == "welcome":
            self.refusals.welcomed()
        if kind not in ("snapshot", "commit", "closed", "hints"):
            return
        message = getattr(frame, kind)
        attachment = self._numbered.get(message.attachment)
        if attachment is None:
            self._refuse()  # it was on its way when the subscription ended
            return
        if attachment.traced is not None:
            attachment.traced.heard()
        vocabulary = attachment.parts.vocabulary or self._vocabulary
        try:
            if kind == "closed":
                self._note(message.reason)
                self.refusals.closed(attachment.key, message.reason)
                self._drop(attachment)
                self._listener.closed(attachment)
            elif message.epoch != attachment.epoch:
                self._refuse()
            elif kind == "snapshot":
                snapshot = attachment.parts.take(message, self._vocabulary, self._features)
                if snapshot is not None:
                    self.refusals.opened(attachment.key)
                    self._listener.opened(attachment, snapshot)
            elif kind == "hints":
                self._listener.updated(attachment, hints_from_pb(message, vocabulary))
            else:
                self._listener.updated(attachment, update_from_pb(message, vocabulary, self._features))
        except OutriderError as error:
            self._refuse()
            log.warning("upstream %s sent a malformed frame: %s", self.address, error)
            self._listener.closed(attachment)
            self.renew(attachment, str(error))

    def _note(self, reason: str) -> None:
        """Says once why no session can be drafted for here."""
        if reason.startswith(WITHOUT) and not self._said_why:
            self._said_why = True
            log.warning("upstream %s: nothing can be drafted for it: %s", self.address, reason)
