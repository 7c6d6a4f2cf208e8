"""The router's end of one Verifier.Decode call."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass

import grpc.aio

from outrider.core.control.attribution import DrafterCredit
from outrider.core.session.contract import Contract, Plan, StepReport
from outrider.errors import Cancelled, InternalError, InvalidRequest, Moved, OutriderError, Unavailable
from outrider.rpc import liveness
from outrider.rpc.codec import contract_to_pb, plan_to_pb, report_from_pb
from outrider.rpc.status import from_rpc_error
from outrider.store.registry import Worker
from outrider.telemetry.tracing import trace_metadata
from outrider.v1 import types_pb2, verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierStub

HEARTBEATS_PER_LEASE = 4
FINISH_S = 2.0  # how long a verifier may take to close a finished call
ACKS_PER_WINDOW = 4  # each costs as much as a chunk to the client, and the verifier needs few

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodeStart:
    """What a verifier needs to begin."""

    session_id: str
    tenant: str
    epoch: int
    model: str
    tokenizer_digest: bytes
    tokens: tuple[int, ...]  # all tokens of the session so far
    digest: int  # over the tokens
    answer_position: int
    contract: Contract
    plan: Plan
    window: int
    lease_s: float
    timeout_s: float | None  # until the deadline; None: no deadline


@dataclass(frozen=True, slots=True)
class ReceivedCommit:
    """The target's next tokens, as one step committed them."""

    epoch: int
    position: int  # position of the first token
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # one for each token
    logprobs: bytes  # as in outrider.core.sampling.logprobs; empty unless the contract asks for them
    digest: int  # over the session with these tokens
    report: StepReport
    credits: tuple[DrafterCredit, ...] = ()  # one for each drafter, where there are several


@dataclass(frozen=True, slots=True)
class DecodeEnd:
    """The generation ended by its contract."""

    stopped: bool  # True: by a stop id; False: by max_tokens


class DecodeIdle:
    """The verifier is alive and has sent nothing for a while."""


class DecodeStream:
    """One session on one verifier, from `open` to `cancel` or the end. Sends heartbeats to the verifier meanwhile."""

    def __init__(self, worker: Worker, channel: grpc.aio.Channel, start: DecodeStart) -> None:
        self.worker = worker
        self.opened = False
        self.over = False  # the verifier has sent its last message
        self.cached = 0  # tokens whose KV the verifier had when the stream opened
        self._start = start
        self._began = time.monotonic()
        self._resumed = len(start.tokens) > start.answer_position  # with a response that another verifier began
        self._durable = self._acknowledged = len(
            start.tokens
        )  # positions: durable in the log; acknowledged to the verifier
        self._plan: Plan | None = None  # to be sent
        self._pending_write = asyncio.Event()  # something is to be sent
        self._call = VerifierStub(channel).Decode(timeout=start.timeout_s, metadata=trace_metadata())
        # Not read(): once a write has met the end of the call, read() skips the messages that are still unread.
        self._responses = liveness.monitored(aiter(self._call), f"verifier {worker.worker_id}")
        self._writing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Send the start and wait until the verifier has given the session a KV slot.

        Raises what the verifier answers: Unavailable and Overloaded mean that another verifier may be tried.
        """
        start = verifier_pb2.DecodeRequest(start=_start_to_pb(self._start))
        # A task, so that `cancel` ends it: gRPC never ends a write whose call is cancelled before its metadata was
        # sent.
        self._writing = asyncio.create_task(self._send(start))
        await self._writing
        response = await self._read()
        if response.WhichOneof("event") != "started":
            raise self._failure("did not begin with DecodeStarted")
        self.opened = True
        self.cached = response.started.cached
        self._writing = asyncio.create_task(self._write())

    async def next(self) -> ReceivedCommit | DecodeEnd | DecodeIdle:
        """Return the next event. Raises Unavailable when the verifier failed, Moved when it is draining,
        DeadlineExceeded at the deadline."""
        response = await self._read()
        match response.WhichOneof("event"):
            case "commit":
                if self._resumed:
                    self._log_resume_cost()
                return self._commit(response.commit)
            case "finished":
                self.over = True
                return DecodeEnd(response.finished.reason == types_pb2.FINISH_REASON_STOP)
            case "heartbeat":
                liveness.check_heartbeat(response.heartbeat, f"verifier {self.worker.worker_id}")
                return DecodeIdle()
            case "moved":
                raise Moved(f"verifier {self.worker.worker_id} is shutting down")
            case event:
                raise self._failure(f"sent {event!r} in the middle of a session")

    def acknowledge(self, position: int) -> None:
        """Allow the verifier to commit a window beyond `position`: every token below it is in the log. An
        acknowledgement is sent ACKS_PER_WINDOW times in each window."""
        self._durable = max(self._durable, position)
        if self._durable - self._acknowledged >= max(1, self._start.window // ACKS_PER_WINDOW):
            self._pending_write.set()

    def plan(self, plan: Plan) -> None:
        """Send a new plan; of several unsent plans only the latest is sent."""
        self._plan = plan
        self._pending_write.set()

    def cancel(self) -> None:
        """End the call; the verifier starts no further step. A pending `next` raises CancelledError."""
        if self._writing is not None:
            self._writing.cancel()
        self._call.cancel()

    async def finish(self) -> None:
        """Close our side after the end of the session and wait until the verifier has closed its own: each read that is
        cancelled leaks 80 bytes in gRPC (grpc/grpc#43360)."""
        self._pending_write.set()
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
        """Send everything behind the start; there is no other writer. If it fails, the verifier ends the session after
        a lease of silence."""
        try:
            await self._write_pending()
        except Exception:
            log.exception("session %s: nothing more is sent to its verifier", self._start.session_id)

    async def _write_pending(self) -> None:
        """Send what is pending, or a heartbeat if nothing is, until the session is over."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._start.lease_s / HEARTBEATS_PER_LEASE):
                    await self._pending_write.wait()
            if self.over:
                return
            self._pending_write.clear()
            plan, self._plan = self._plan, None
            if plan is not None:
                await self._send(verifier_pb2.DecodeRequest(plan=plan_to_pb(plan)))
            if self._durable > self._acknowledged:
                self._acknowledged = self._durable
                await self._send(verifier_pb2.DecodeRequest(durable=self._durable))
            elif plan is None:
                await self._send(verifier_pb2.DecodeRequest(heartbeat=types_pb2.Heartbeat()))

    def _log_resume_cost(self) -> None:
        self._resumed = False
        reread, took = len(self._start.tokens) - self.cached, time.monotonic() - self._began
        where = self.worker.worker_id
        log.info("session %s goes on at %s: %d tokens read again, %.3f s", self._start.session_id, where, reread, took)

    def _commit(self, commit: verifier_pb2.DecodeCommit) -> ReceivedCommit:
        if len(commit.gaps) != len(commit.tokens):
            raise self._failure(f"sent {len(commit.gaps)} gaps for {len(commit.tokens)} tokens")
        if commit.position + len(commit.tokens) > self._acknowledged + self._start.window:
            raise self._failure(f"committed more than {self._start.window} tokens beyond the durable ones")
        if commit.epoch != self._start.epoch:
            raise self._failure(f"committed under epoch {commit.epoch}, not {self._start.epoch}")
        try:
            report = report_from_pb(commit.report)
        except InvalidRequest as error:
            raise self._failure(f"sent a malformed commit ({error})") from None
        return ReceivedCommit(
            epoch=commit.epoch,
            position=commit.position,
            tokens=tuple(commit.tokens),
            gaps=tuple(commit.gaps),
            logprobs=commit.logprobs,
            digest=commit.digest,
            report=report,
            credits=tuple(
                DrafterCredit(credit.drafter_id, credit.verified, credit.accepted, credit.alone)
                for credit in commit.credits
            ),
        )

    async def _send(self, request: verifier_pb2.DecodeRequest) -> None:
        # An error means that the call has ended; `_read` raises the reason.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(request)

    async def _read(self) -> verifier_pb2.DecodeResponse:
        try:
            return await anext(self._responses)
        except StopAsyncIteration:
            raise self._failure("ended the session early") from None
        except grpc.aio.AioRpcError as error:
            raise self._translated(from_rpc_error(error)) from None

    def _translated(self, error: OutriderError) -> OutriderError:
        if isinstance(error, Moved):
            return error
        # This side did not cancel: the verifier is draining. gRPC reports a write that meets that end as an internal
        # error.
        if isinstance(error, Unavailable | Cancelled | InternalError):
            return self._failure(f"failed ({error})")
        return error

    def _failure(self, what: str) -> Unavailable:
        return Unavailable(f"verifier {self.worker.worker_id} at {self.worker.address} {what}; try again")


def _start_to_pb(start: DecodeStart) -> verifier_pb2.DecodeStart:
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
