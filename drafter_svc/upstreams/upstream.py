"""The stream to one upstream: carries all sessions drafted for it; reconnected while any is attached."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import grpc.aio

from drafter_svc.tracing import TracedDrafts
from drafter_svc.upstreams.outgoing import OutgoingFrames
from drafter_svc.upstreams.refusals import FEATURES_REFUSED, Refusals
from outrider.core.session.snapshot import MirrorSnapshot, MirrorUpdate
from outrider.core.tree.delta import Delta, Hints
from outrider.errors import OutriderError
from outrider.rpc import liveness
from outrider.rpc.channels import open_channel
from outrider.rpc.lifecycle import task_group
from outrider.rpc.status import from_rpc_error
from outrider.rpc.supervision import keep_running
from outrider.rpc.tls import SERVER, Tls
from outrider.wire import drafter as wire
from outrider.wire.drafter import (
    NO_FEATURES,
    PartialSnapshot,
    WantedFeatures,
    delta_to_pb,
    hints_from_pb,
    update_from_pb,
)
from outrider.wire.message_bounds import LONG, decode
from outrider.wire.tickets import OWN_TENANT

log = logging.getLogger(__name__)

RETRY_S = 0.2  # between two attempts to reach an upstream
MAX_RENEWALS = 16  # repeated subscriptions of an attachment within RENEWALS_S; one more ends it
RENEWALS_S = 10.0

DraftCall = grpc.aio.StreamStreamCall[wire.DraftUp, wire.DraftDown]


class Route(NamedTuple):
    """The way to an upstream that is reached through a router."""

    address: str  # the router's
    tls: Tls | None
    server_name: str
    metadata: tuple[tuple[str, str], ...]  # of the stream


class Listener(Protocol):
    """Receives an upstream's messages about sessions."""

    def opened(self, key: Attachment, snapshot: MirrorSnapshot) -> None:
        """Take the committed tokens and the terms: start to draft, or restart."""

    def updated(self, key: Attachment, update: MirrorUpdate | Hints) -> None:
        """Take new committed tokens, new terms, or the hints of an upstream that drafts itself."""

    def closed(self, key: Attachment) -> None:
        """Stop drafting for this session until it is opened again."""

    @property
    def progress(self) -> liveness.WorkClock:
        """The progress of the listener's passes, for heartbeats."""

    @property
    def level_s(self) -> float:
        """Seconds until the next delta of a session that is not exhausted, on average; 0: not known."""


@dataclass(eq=False, slots=True)
class Attachment:
    """One session that is drafted for one upstream."""

    session_id: str
    tenant: str
    epoch: int
    ticket: bytes
    number: int = 0  # of the last subscription
    parts: PartialSnapshot = field(default_factory=PartialSnapshot)
    traced: TracedDrafts | None = None  # set if the request is traced
    renewals: int = 0  # since `renewed_s`
    renewed_s: float = 0.0  # of the monotonic clock

    @property
    def key(self) -> tuple[str, int]:
        """The session and its epoch, the key among refusals."""
        return self.session_id, self.epoch


class Upstream:
    """The Draft stream to one upstream: opened for the first attachment, and again while there are any.

    When the stream breaks, the listener's sessions are closed; when it is back, they are subscribed again.
    """

    def __init__(
        self,
        address: str,
        hello: wire.Hello,
        listener: Listener,
        count_refusal: Callable[[], None],
        tls: Tls | None = None,
        wanted: WantedFeatures = NO_FEATURES,
        route: Route | None = None,
    ) -> None:
        """`route`: the way there, of an address that is none; None: the address itself."""
        self.address = address
        self.route = route
        self.attachments: dict[str, Attachment] = {}
        self.refusals = Refusals()
        self._hello = hello
        self._listener = listener
        self._count_refusal = count_refusal
        self._tls = tls
        self._features = wanted
        self._reason_logged = False  # whether it was logged that no session can be drafted for
        self._outgoing = OutgoingFrames(lambda: listener.level_s, lambda: listener.progress.heartbeat())
        self._numbered: dict[int, Attachment] = {}  # by the number of the subscription
        self._numbers = 0
        self._idle_since = time.monotonic()
        self._wanted = asyncio.Event()  # set while there are attachments
        self._task = asyncio.create_task(keep_running("upstream", self._run))

    @property
    def own(self) -> list[Attachment]:
        """Sessions that the upstream has attached itself, the latest last."""
        return [it for it in self.attachments.values() if it.tenant == OWN_TENANT]

    @property
    def idle_s(self) -> float:
        """Seconds since the last session was detached; 0 while any is attached."""
        return 0.0 if self.attachments else time.monotonic() - self._idle_since

    def attach(self, attachment: Attachment) -> None:
        """Start drafting for a session."""
        self.attachments[attachment.session_id] = attachment
        self._wanted.set()
        if self._outgoing.open:
            self._subscribe(attachment)

    def resubscribe(self, attachment: Attachment, reason: str) -> None:
        """Subscribe a session again, whose mirror differs from the upstream's copy or whose frames are malformed.
        After too many times its drafting ends, and the router receives the reason.
        """
        now = time.monotonic()
        if now - attachment.renewed_s > RENEWALS_S:
            attachment.renewals, attachment.renewed_s = 0, now
        attachment.renewals += 1
        if attachment.renewals <= MAX_RENEWALS:
            self.attach(attachment)
            return
        reason = f"malformed: {reason}"
        log.warning("upstream %s: session %s gets no more drafts: %s", self.address, attachment.session_id, reason)
        self.refusals.closed(attachment.key, reason)
        self.detach(attachment)
        self._listener.closed(attachment)

    def detach(self, attachment: Attachment) -> None:
        """Stop drafting for a session."""
        if self.attachments.get(attachment.session_id) is attachment:
            self._drop(attachment)
            self._outgoing.put(wire.DraftUp(unsubscribe=wire.Unsubscribe(attachment=attachment.number)))

    def send(self, attachment: Attachment, delta: Delta, plan_version: int, exhausted: bool) -> None:
        """Send new nodes. The upstream's credit bounds what may be queued here."""
        if attachment.traced is not None:
            delta = attachment.traced.trace_delta(delta, exhausted=exhausted)
        number, epoch = attachment.number, attachment.epoch
        frame = delta_to_pb(delta, attachment=number, epoch=epoch, plan_version=plan_version, exhausted=exhausted)
        self._outgoing.put(frame)

    async def close(self) -> None:
        """End the stream."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _drop(self, attachment: Attachment) -> None:
        del self.attachments[attachment.session_id]
        self._numbered.pop(attachment.number, None)
        if attachment.traced is not None:
            attachment.traced.end()
        if not self.attachments:
            self._idle_since = time.monotonic()
            self._wanted.clear()

    def _subscribe(self, attachment: Attachment) -> None:
        self._numbered.pop(attachment.number, None)
        self._numbers += 1
        attachment.number = self._numbers
        self._numbered[attachment.number] = attachment
        attachment.parts.clear()
        subscribe = wire.Subscribe(
            session_id=attachment.session_id,
            epoch=attachment.epoch,
            attachment=attachment.number,
            ticket=attachment.ticket,
            features=self._features.digest,
        )
        self._outgoing.put(wire.DraftUp(subscribe=subscribe))

    async def _run(self) -> None:
        reachable = True
        self._tls = self._tls and self._tls.renewed()
        way = self.route or Route(self.address, self._tls, SERVER, ())
        async with open_channel(way.address, way.tls, way.server_name) as channel:
            while True:
                await self._wanted.wait()
                try:
                    await self._run_stream(channel)
                    reachable = True
                except (grpc.aio.AioRpcError, OutriderError) as error:
                    known = from_rpc_error(error) if isinstance(error, grpc.aio.AioRpcError) else error
                    self.refusals.failed(known)
                    if reachable:
                        log.warning("upstream %s: %s", self.address, known)
                    reachable = False
                finally:
                    self._outgoing.open = False
                    for attachment in self.attachments.values():
                        self._listener.closed(attachment)
                await asyncio.sleep(RETRY_S)

    async def _run_stream(self, channel: grpc.aio.Channel) -> None:
        self._outgoing.begin(self._hello)
        for attachment in self.attachments.values():
            self._subscribe(attachment)
        decoded = partial(decode, wire.DraftDown, LONG)
        metadata = self.route.metadata if self.route else None
        call = channel.stream_stream(wire.DRAFT, wire.DraftUp.SerializeToString, decoded)(None, metadata=metadata)
        try:
            async with task_group() as tasks:  # when writing fails, reading must end
                parallel = [tasks.create_task(self._write(call)), tasks.create_task(self._outgoing.overrun())]
                async for frame in liveness.monitored(self._frames(call), f"upstream {self.address}"):
                    self._receive(frame)
                for task in parallel:
                    task.cancel()
        finally:
            call.cancel()

    async def _frames(self, call: DraftCall) -> AsyncIterator[wire.DraftDown]:
        """Yield received frames; count bytes that do not parse, or are too many, which gRPC gives as None."""
        async for frame in call:
            if frame is None:
                self._count_refusal()
            yield frame

    async def _write(self, call: DraftCall) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader gets the error
            while True:
                await call.write(await self._outgoing.next())

    def _receive(self, frame: wire.DraftDown) -> None:
        for commit in frame.commits:
            self._receive_for_session("commit", commit)
        kind = frame.WhichOneof("frame")
        if kind == "heartbeat":
            liveness.check_heartbeat(frame.heartbeat, f"upstream {self.address}")
        elif kind == "welcome":
            self._outgoing.batches = frame.welcome.batches
            self.refusals.welcomed()
        elif kind in ("snapshot", "commit", "closed", "hints"):
            self._receive_for_session(kind, getattr(frame, kind))

    def _receive_for_session(self, kind: str, message: Any) -> None:
        attachment = self._numbered.get(message.attachment)
        if attachment is None:
            self._count_refusal()  # sent before the subscription's end was received
            return
        if attachment.traced is not None:
            attachment.traced.start_draft()
        vocabulary = attachment.parts.vocabulary or self._hello.vocabulary
        try:
            if kind == "closed":
                self._log_reason(message.reason)
                self.refusals.closed(attachment.key, message.reason)
                self._drop(attachment)
                self._listener.closed(attachment)
            elif message.epoch != attachment.epoch:
                self._count_refusal()
            elif kind == "snapshot":
                snapshot = attachment.parts.add_part(message, self._hello.vocabulary, self._features)
                if snapshot is not None:
                    self.refusals.opened(attachment.key)
                    self._listener.opened(attachment, snapshot)
            elif kind == "hints":
                self._listener.updated(attachment, hints_from_pb(message, vocabulary))
            else:
                self._listener.updated(attachment, update_from_pb(message, vocabulary, self._features))
        except OutriderError as error:
            self._count_refusal()
            log.warning("upstream %s sent a malformed frame: %s", self.address, error)
            self._listener.closed(attachment)
            self.resubscribe(attachment, str(error))

    def _log_reason(self, reason: str) -> None:
        """Log once why no session can be drafted for here."""
        if reason.startswith(FEATURES_REFUSED) and not self._reason_logged:
            self._reason_logged = True
            log.warning("upstream %s: nothing can be drafted for it: %s", self.address, reason)
