"""The router's end of one Verifier.Decode call."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass

import grpc.aio

from outrider.core.contract import Contract, Plan, StepReport
from outrider.core.credit import Credit
from outrider.errors import Cancelled, InternalError, InvalidRequest, Moved, OutriderError, Unavailable
from outrider.rpc import liveness
from outrider.rpc.codec import contract_to_pb, plan_to_pb, report_from_pb
from outrider.rpc.status import from_rpc_error
from outrider.store.registry import Worker
from outrider.telemetry.tracing import carried
from outrider.v1 import types_pb2, verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierStub

BEATS = 4  # heartbeats in a lease
FINISH_S = 2.0  # for a verifier to end a call that is over
ACKNOWLEDGEMENTS = 4  # in a window: each costs as much as a chunk to the client, and the verifier needs few

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """What a verifier has to know to begin."""

    session_id: str
    tenant: str
    epoch: int
    model: str
    tokenizer_digest: bytes
    tokens: tuple[int, ...]  # of the session so far
    digest: int  # over them
    answer_position: int
    contract: Contract
    plan: Plan
    window: int
    lease_s: float
    timeout_s: float | None  # until the deadline; None: none


@dataclass(frozen=True, slots=True)
class Commit:
    """The target's next tokens, as one step committed them."""

    epoch: int
    position: int  # of the first
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # one for each token
    logprobs: bytes  # as in outrider.core.logprobs; empty unless the contract asks for them
    digest: int  # over the session with them
    report: StepReport
    owed: tuple[Credit, ...] = ()  # one for each drafter, where there are several


@dataclass(frozen=True, slots=True)
class End:
    """The generation ended by its contract."""

    stopped: bool  # by a stop id; else by max_tokens


class Idle:
    """Nothing happened for a while, and the verifier is alive."""


class DecodeStream:
    """One session on one verifier, from `open` to `cancel` or the end. Tells the verifier that we are alive."""

    def __init__(self, worker: Worker, channel: grpc.aio.Channel, start: Start) -> None:
        self.worker = worker
        self.opened = False
        self.over = False  # the verifier has sent all that there is
        self.cached = 0  # tokens whose KV was there, once it is open
        self._start = start
        self._began = time.monotonic()
        self._goes_on = len(start.tokens) > start.answer_position  # with an answer that another one began
        self._durable = self._acknowledged = len(start.tokens)  # positions: that the log holds, that was sent
        self._plan: Plan | None = None  # to be sent
        self._news = asyncio.Event()  # there is something to send
        self._call = VerifierStub(channel).Decode(timeout=start.timeout_s, metadata=carried())
        # Not read(): once a write met the end of the call, that skips the messages which are still to be read.
        self._responses = liveness.heard(aiter(self._call), f"verifier {worker.worker_id}")
        self._writing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Sends the start and waits until the session has a place.

        Raises what the verifier answers: Unavailable and Overloaded say that another one may be asked.
        """
        start = verifier_pb2.DecodeRequest(start=_start_to_pb(self._start))
        # A task, so that `cancel` ends it: gRPC never ends a write whose call is cancelled before its metadata went.
        self._writing = asyncio.create_task(self._send(start))
        await self._writing
        response = await self._read()
        if response.WhichOneof("event") != "started":
            raise self._broken("did not begin with DecodeStarted")
        self.opened = True
        self.cached = response.started.cached
        self._writing = asyncio.create_task(self._write())

    async def next(self) -> Commit | End | Idle:
        """What happens next. Raises Unavailable when the verifier failed, Moved when it is going down,
        DeadlineExceeded in time."""
        response = await self._read()
        match response.WhichOneof("event"):
            case "commit":
                if self._goes_on:
                    self._say_how_long()
                return self._commit(response.commit)
            case "finished":
                self.over = True
                return End(response.finished.reason == types_pb2.FINISH_REASON_STOP)
            case "heartbeat":
                liveness.check(response.heartbeat, f"verifier {self.worker.worker_id}")
                return Idle()
            case "moved":
                raise Moved(f"verifier {self.worker.worker_id} is going down")
            case event:
                raise self._broken(f"sent {event!r} in the middle of a session")

    def acknowledge(self, position: int) -> None:
        """Every token below `position` is in the log, and the verifier may commit a window beyond it. It is sent a few
        times in each window."""
        self._durable = max(self._durable, position)
        if self._durable - self._acknowledged >= max(1, self._start.window // ACKNOWLEDGEMENTS):
            self._news.set()

    def plan(self, plan: Plan) -> None:
        """Sends new ceilings, the latest alone."""
        self._plan = plan
        self._news.set()

    def cancel(self) -> None:
        """Ends the call; the verifier starts no further step. A pending `next` raises CancelledError."""
        if self._writing is not None:
            self._writing.cancel()
        self._call.cancel()

    async def finish(self) -> None:
        """Closes our side once it is over, and waits until the verifier has closed its own: a read that is cancelled
        costs gRPC 80 bytes for ever (grpc/grpc#43360)."""
        self._news.set()
        try:
            async with asyncio.timeout(FINISH_S):
                if self._writing is not None:
                    await self._writing
                await self._call.done_writing()
                async for _ in self._responses:
                    pass
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError, Unavailable) as error:
            log.debug("session %s: its verifier did not close: %s", self._start.session_id, error)
        finally:
            self._call.cancel()

    async def _write(self) -> None:
        """The only writer behind the start. Where it fails the verifier ends the session after a lease of silence."""
        try:
            await self._write_news()
        except Exception:
            log.exception("session %s: nothing more is sent to its verifier", self._start.session_id)

    async def _write_news(self) -> None:
        """Writes what is new, and a heartbeat where nothing is, until it is over."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._start.lease_s / BEATS):
                    await self._news.wait()
            if self.over:
                return
            self._news.clear()
            plan, self._plan = self._plan, None
            if plan is not None:
                await self._send(verifier_pb2.DecodeRequest(plan=plan_to_pb(plan)))
            if self._durable > self._acknowledged:
                self._acknowledged = self._durable
                await self._send(verifier_pb2.DecodeRequest(durable=self._durable))
            elif plan is None:
                await self._send(verifier_pb2.DecodeRequest(heartbeat=types_pb2.Heartbeat()))

    def _say_how_long(self) -> None:
        self._goes_on = False
        again, took = len(self._start.tokens) - self.cached, time.monotonic() - self._began
        where = self.worker.worker_id
        log.info("session %s goes on at %s: %d tokens read again, %.3f s", self._start.session_id, where, again, took)

    def _commit(self, commit: verifier_pb2.DecodeCommit) -> Commit:
        if len(commit.gaps) != len(commit.tokens):
            raise self._broken(f"sent {len(commit.gaps)} gaps for {len(commit.tokens)} tokens")
        if commit.position + len(commit.tokens) > self._acknowledged + self._start.window:
            raise self._broken(f"committed more than {self._start.window} tokens beyond the durable ones")
        if commit.epoch != self._start.epoch:
            raise self._broken(f"committed under epoch {commit.epoch}, not {self._start.epoch}")
        try:
            report = report_from_pb(commit.report)
        except InvalidRequest as error:
            raise self._broken(f"sent a malformed commit ({error})") from None
        return Commit(
            epoch=commit.epoch,
            position=commit.position,
            tokens=tuple(commit.tokens),
            gaps=tuple(commit.gaps),
            logprobs=commit.logprobs,
            digest=commit.digest,
            report=report,
            owed=tuple(
                Credit(credit.drafter_id, credit.verified, credit.accepted, credit.alone) for credit in commit.credits
            ),
        )

    async def _send(self, request: verifier_pb2.DecodeRequest) -> None:
        # An error says that the call has ended; reading says how.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(request)

    async def _read(self) -> verifier_pb2.DecodeResponse:
        try:
            return await anext(self._responses)
        except StopAsyncIteration:
            raise self._broken("ended the session early") from None
        except grpc.aio.AioRpcError as error:
            raise self._translated(from_rpc_error(error)) from None

    def _translated(self, error: OutriderError) -> OutriderError:
        if isinstance(error, Moved):
            return error
        # Nobody here cancelled: the verifier is going down. A write that meets that end makes it an internal error.
        if isinstance(error, Unavailable | Cancelled | InternalError):
            return self._broken(f"failed ({error})")
        return error

    def _broken(self, what: str) -> Unavailable:
        return Unavailable(f"verifier {self.worker.worker_id} at {self.worker.address} {what}; try again")


def _start_to_pb(start: Start) -> verifier_pb2.DecodeStart:
    return verifier_pb2.DecodeStart(
        session_id=start.session_id,
        tenant=start.tenant,
        epoch=start.epoch,
        model=start.model,
        tokenizer_digest=start.tokenizer_digest,
        tokens=start.tokens,
        digest=start.digest,
        answer_position=start.answer_position,
        contract=contract_to_pb(start.contract),
        plan=plan_to_pb(start.plan),
        window=start.window,
        lease_ms=round(start.lease_s * 1000),
    )
