"""The TreeSink service: admits drafters to sessions, and receives their nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from outrider.core.control.cost.calibration import Calibration
from outrider.core.tree.delta import DigestMismatch
from outrider.errors import Forbidden, InvalidRequest, NotFound, OutriderError, Overloaded, TokenizerMismatch
from outrider.rpc import liveness
from outrider.rpc.drafter_ids import UNNAMED, holder_of, name_of
from outrider.rpc.status import errors_as_status
from outrider.upstream.drafter_sender import DrafterSender
from outrider.upstream.entrance import Entrance
from outrider.upstream.upstream_session import UpstreamSession, UpstreamStream, WaitingSubscribe
from outrider.wire import drafter as wire
from outrider.wire.drafter import delta_from_pb
from outrider.wire.message_bounds import BEFORE_A_TICKET, REQUEST, decode
from outrider.wire.tickets import Permit

log = logging.getLogger(__name__)

SUBSCRIBE_BYTES = 4096  # size of a subscription, its ticket included
WAITING_SUBSCRIPTIONS = 1024  # subscriptions of one drafter that came before their session, or their ticket's key
PATIENCE_S = 5.0  # how long such a subscription may wait
LAST_WRITE_S = 1.0  # time for a write that is under way when a stream ends
MAX_REFUSED = 1000  # refused frames in a row that a stream may have; a session's end explains a handful
MAX_STREAMS = 4  # of one drafter's id, that tickets have admitted: one, and those that it has lost
DRAFTERS_REMEMBERED = 1024  # drafters whose calibration is kept

Requests = AsyncIterator[bytes]  # serialized DraftUps: what they may have at most depends on the stream


class Tickets(Protocol):
    """What a drafter's ticket is checked by."""

    def check(self, ticket: bytes, permit: Permit) -> None:
        """Raise Forbidden unless the ticket grants this permit."""

    def request_reading(self, ticket: bytes) -> int | None:
        """Return the number of the reading of keys that the ticket waits for; None: it can be checked now."""

    async def run(self, on_read: Callable[[int], None]) -> None:
        """Read keys whenever a reading is requested; call `on_read` after each. Run until cancelled."""


class SessionHost(Protocol):
    """The owner of the sessions: a verifier's scheduler, or that of a drafter that serves a lower tier."""

    @property
    def sessions(self) -> Mapping[str, UpstreamSession]:
        """The sessions by their ids."""

    @property
    def progress(self) -> liveness.WorkClock:
        """The progress of the owner's passes, for heartbeats."""

    def wake(self) -> None:
        """Wake the owner: something changed that may make a session ready or a tree better."""

    def on_drafter_connected(self, drafter_id: str) -> None:
        """A drafter's stream has opened."""


class UpstreamServicer:
    """Grafts the nodes that drafters send onto their sessions' trees; `sender` sends drafters the commits."""

    def __init__(
        self,
        worker_id: str,
        tokenizer_digest: bytes,
        tickets: Tickets,
        fusion: bytes = b"",
        trusted: Collection[str] = (UNNAMED,),
    ) -> None:
        """`fusion`: digest of the fusion of sessions' features; empty: sessions have no features. `trusted`: names in
        the certificates of the drafters that may draft under rules that draw from q; without certificates all may."""
        self.sender = DrafterSender()
        self.refused = 0
        self._fusion = fusion
        self._trusted = trusted
        self._worker_id = worker_id
        self._tokenizer_digest = tokenizer_digest
        self._tickets = tickets
        self._entrance = Entrance()
        self._streams: set[UpstreamStream] = set()
        self._calibrations: dict[str, Calibration] = {}  # by drafter
        self._host: SessionHost

    @property
    def streams(self) -> int:
        """Number of open draft streams."""
        return len(self._streams)

    def serve(self, host: SessionHost) -> None:
        """Take the sessions from `host`. Called once, before the first stream."""
        self._host = host

    def register(self, server: grpc.aio.Server) -> str:
        """Add the service to a server. Return its full name."""
        name = wire.DESCRIPTOR.services_by_name["TreeSink"].full_name
        handler = grpc.stream_stream_rpc_method_handler(self.Draft, None, wire.DraftDown.SerializeToString)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Draft": handler}),))
        return name

    def begin_drain(self) -> None:
        """End all streams, once all queued frames are written."""
        for stream in self._streams:
            stream.finish()

    async def Draft(self, requests: Requests, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Serve one drafter's stream for as long as it is open."""
        async with (
            errors_as_status(context),
            self._counting(),
            self._entrance.enter() as on_admitted,
            aclosing(aiter(requests)) as messages,  # type: ignore[type-var]  # gRPC's are generators
            aclosing(liveness.monitored(messages, "the drafter")) as frames,
        ):  # closed at once: a generator that waits holds the latest message, and the garbage collector is late
            stream = await self._greet(frames, context, on_admitted)
            reading = asyncio.create_task(self._read(stream, frames))
            writing = asyncio.create_task(_write(stream, context))
            self._streams.add(stream)
            self._host.on_drafter_connected(stream.drafter_id)
            try:
                done, _ = await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                self._forget(stream)
                reading.cancel()
                stream.end()  # gRPC cannot send the status of a call while a write is under way
                await asyncio.wait({writing}, timeout=LAST_WRITE_S)
                writing.cancel()
                await asyncio.gather(reading, writing, return_exceptions=True)

    def subscribe_waiting(self, session: UpstreamSession) -> None:
        """Subscribe the drafters that were waiting for this session, which has opened."""
        for stream in self._streams:
            for attachment, waiting in list(stream.waiting.items()):
                if waiting.subscribe.session_id == session.id and waiting.reading is None:
                    del stream.waiting[attachment]
                    self._open(stream, waiting.subscribe)

    async def read_ticket_keys(self) -> None:
        """Read the routers' public keys when a ticket needs them. Run until cancelled."""
        await self._tickets.run(self._on_keys_read)

    @asynccontextmanager
    async def _counting(self) -> AsyncIterator[None]:
        """Count a refused frame that ends its stream."""
        try:
            yield
        except (Forbidden, InvalidRequest, TokenizerMismatch, DecodeError):
            self.refused += 1
            raise

    async def _greet(
        self, frames: Requests, context: grpc.aio.ServicerContext[Any, Any], on_admitted: Callable[[], None]
    ) -> UpstreamStream:
        first = decode(wire.DraftUp, BEFORE_A_TICKET, await anext(frames, b""))
        if first.WhichOneof("frame") != "hello":
            raise InvalidRequest("hello", "must be the first frame of Draft")
        hello = first.hello
        if hello.tokenizer_digest != self._tokenizer_digest:
            raise TokenizerMismatch(
                f"tokenizer_digest: drafter '{hello.drafter_id}' uses another tokenizer than this upstream's model; "
                "draft with a model of the same family, or start the drafter with --target"
            )
        holder = holder_of(context, hello.drafter_id)
        stream = UpstreamStream(hello.drafter_id, self._host.progress.heartbeat, holder, on_admitted)
        stream.public_sources, stream.batches = hello.public_sources, hello.batches
        stream.queue_control(wire.DraftDown(welcome=wire.Welcome(upstream_id=self._worker_id, batches=True)))
        return stream

    async def _read(self, stream: UpstreamStream, frames: Requests) -> None:
        refused_in_a_row = 0
        async for data in frames:
            message = decode(wire.DraftUp, REQUEST if stream.admitted else BEFORE_A_TICKET, data)
            for frame in message.deltas or (message,):
                refused = self.refused
                self.receive(stream, frame)
                refused_in_a_row = refused_in_a_row + 1 if self.refused > refused else 0
                if refused_in_a_row > MAX_REFUSED:
                    raise Overloaded(f"more than {MAX_REFUSED} frames in a row were refused")
            stream.check()

    def receive(self, stream: UpstreamStream, frame: wire.DraftUp | wire.TreeDelta) -> None:
        """Take a frame of a drafter. A malformed one costs its session the drafter, and no more."""
        if isinstance(frame, wire.TreeDelta):
            self._graft(stream, frame)
            return
        match frame.WhichOneof("frame"):
            case "delta":
                self._graft(stream, frame.delta)
            case "subscribe":
                self._subscribe(stream, frame.subscribe)
            case "unsubscribe":
                self._unsubscribe(stream, frame.unsubscribe)
            case "heartbeat":
                liveness.check_heartbeat(frame.heartbeat, f"drafter {stream.drafter_id}")
            case kind:
                raise InvalidRequest("frame", f"'{kind}' is not allowed here")

    def _subscribe(self, stream: UpstreamStream, subscribe: wire.Subscribe) -> None:
        if subscribe.attachment <= stream.attached:
            self.refused += 1  # a replay
            return
        stream.attached = subscribe.attachment
        if subscribe.ByteSize() > SUBSCRIBE_BYTES:
            self._refuse(stream, subscribe.attachment, f"malformed: a subscription has at most {SUBSCRIBE_BYTES} bytes")
        else:
            self._open(stream, subscribe)

    def _open(self, stream: UpstreamStream, subscribe: wire.Subscribe) -> None:
        """Subscribe a drafter to its session, have it wait for the session or its ticket's key, or refuse it with the
        reason.
        """
        session = self._host.sessions.get(subscribe.session_id)
        reading = self._tickets.request_reading(subscribe.ticket)
        try:
            if session is None or reading is not None:
                self._wait(stream, subscribe, None if session is None else reading)
            else:
                self._admit(stream, subscribe, session)
        except OutriderError as error:
            self._refuse(stream, subscribe.attachment, str(error))

    def _admit(self, stream: UpstreamStream, subscribe: wire.Subscribe, session: UpstreamSession) -> None:
        if subscribe.epoch != session.epoch:
            raise Forbidden(f"fenced: the session is at epoch {session.epoch}")
        permit = Permit(session.id, session.tenant, stream.drafter_id, self._worker_id, subscribe.epoch)
        self._tickets.check(subscribe.ticket, permit)
        _check_holder(stream, self._streams)
        _check_trust(stream, session, self._trusted)
        _check_features(subscribe.features, self._fusion)
        calibration, wants_features = self._calibration(stream.drafter_id), bool(subscribe.features)
        subscription = session.subscribe(stream, subscribe.attachment, calibration, wants_features=wants_features)
        self.sender.snapshot(subscription)
        session.on_drafter_subscribed()
        self._host.wake()

    def _calibration(self, drafter_id: str) -> Calibration:
        if drafter_id not in self._calibrations and len(self._calibrations) >= DRAFTERS_REMEMBERED:
            del self._calibrations[next(iter(self._calibrations))]
        return self._calibrations.setdefault(drafter_id, Calibration())

    def _wait(self, stream: UpstreamStream, subscribe: wire.Subscribe, reading: int | None) -> None:
        if len(stream.waiting) >= WAITING_SUBSCRIPTIONS:
            raise Overloaded("too many subscriptions wait for their session or their ticket's key")
        stream.waiting[subscribe.attachment] = WaitingSubscribe(subscribe, reading)
        asyncio.get_running_loop().call_later(PATIENCE_S, self._settle, stream, subscribe.attachment)

    def _on_keys_read(self, number: int) -> None:
        for stream in self._streams:
            for attachment, waiting in list(stream.waiting.items()):
                if waiting.reading is not None and waiting.reading <= number:
                    self._settle(stream, attachment)

    def _settle(self, stream: UpstreamStream, attachment: int) -> None:
        """Subscribe a drafter that has waited, or refuse it; it waits no longer."""
        waiting = stream.waiting.pop(attachment, None)
        if waiting is None:
            return
        session = self._host.sessions.get(waiting.subscribe.session_id)
        try:
            if session is None:
                raise NotFound("unknown session")
            self._admit(stream, waiting.subscribe, session)
        except OutriderError as error:
            self._refuse(stream, attachment, str(error))

    def _unsubscribe(self, stream: UpstreamStream, unsubscribe: wire.Unsubscribe) -> None:
        subscription = stream.subscriptions.get(unsubscribe.attachment)
        if subscription:
            subscription.session.unsubscribe(stream)
            self._host.wake()
        elif not stream.waiting.pop(unsubscribe.attachment, None):
            self.refused += 1  # sent before the session's end was received

    def _graft(self, stream: UpstreamStream, message: wire.TreeDelta) -> None:
        subscription = stream.subscriptions.get(message.attachment)
        if subscription is None or subscription.session.epoch != message.epoch:
            self.refused += 1  # sent before the session's end or new owner was known
            return
        session = subscription.session
        session.wire_bytes += message.ByteSize()
        try:
            delta = delta_from_pb(message, session.unpadded_vocabulary)
            dropped = session.graft(subscription, delta, time.monotonic(), passing=self._host.progress.running)
        except DigestMismatch:
            self.refused += 1
            self.sender.snapshot(subscription)
            return
        except OutriderError as error:
            log.warning("drafter %s is detached from a session: %s", stream.drafter_id, error)
            session.unsubscribe(stream)
            self._refuse(stream, message.attachment, f"malformed: {error}")
            return
        if message.exhausted:
            session.exhaust(subscription, message.root_position)
        self.sender.report_dropped(dropped)
        self._host.wake()

    def _refuse(self, stream: UpstreamStream, attachment: int, reason: str) -> None:
        self.refused += 1
        stream.close(attachment, reason)

    def _forget(self, stream: UpstreamStream) -> None:
        self._streams.discard(stream)
        stream.waiting.clear()
        for subscription in list(stream.subscriptions.values()):
            subscription.session.unsubscribe(stream)
        self._host.wake()


async def _write(stream: UpstreamStream, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    with suppress(grpc.aio.InternalError, grpc.aio.UsageError):  # the call has ended; the reader gets the error
        while (frame := await stream.next()) is not None:
            await context.write(frame)


def _check_holder(stream: UpstreamStream, streams: Collection[UpstreamStream]) -> None:
    """Raise Forbidden if another holder has an open stream under the same id that a ticket has admitted, and
    Overloaded if its own are too many."""
    same = [other for other in streams if other.admitted and other.drafter_id == stream.drafter_id]
    if any(other.holder != stream.holder for other in same):
        raise Forbidden("foreign drafter: a drafter with another certificate drafts here under the same id")
    if not stream.admitted and len(same) >= MAX_STREAMS:
        raise Overloaded(f"a drafter has at most {MAX_STREAMS} streams here at a time")
    stream.admit()


def _check_trust(stream: UpstreamStream, session: UpstreamSession, trusted: Collection[str]) -> None:
    """Raise Forbidden if the session's rule takes the drafter's word for what was drawn, and it is not trusted."""
    if session.drawn and stream.holder and name_of(stream.drafter_id) not in trusted:
        raise Forbidden(
            f"untrusted drafter: {session.rule.name} lets its drafter decide the text, and `trusted_drafters` of "
            f"the verifier does not have {name_of(stream.drafter_id)!r}; add it there, or use shared-noise"
        )


def _check_features(wanted: bytes, fusion: bytes) -> None:
    if wanted and not fusion:
        raise InvalidRequest(
            "features", "this upstream gives none; start the verifier with the drafter's heads as its features"
        )
    if wanted and wanted != fusion:
        raise InvalidRequest(
            "features", "this verifier's are fused by other heads; give both the same folder, and start them anew"
        )
