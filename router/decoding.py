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
        self.cached = 0  # tokens whose KV was there, once it is open
        self._start = start
        self._began = time.monotonic()
        self._goes_on = len(start.tokens) > start.answer_position  # with an answer that another one began
        self._acknowledged = len(start.tokens)
        self._call = VerifierStub(channel).Decode(timeout=start.timeout_s, metadata=carried())
        # Not read(): once a write met the end of the call, that skips the messages which are still to be read.
        self._responses = liveness.heard(aiter(self._call), f"verifier {worker.worker_id}")
        self._writing = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Sends the start and waits until the session has a place.

        Raises what the verifier answers: Unavailable and Overloaded say that another one may be asked.
        """
        await self._send(verifier_pb2.DecodeRequest(start=_start_to_pb(self._start)))
        response = await self._read()
        if response.WhichOneof("event") != "started":
            raise self._broken("did not begin with DecodeStarted")
        self.opened = True
        self.cached = response.started.cached
        self._beating = asyncio.create_task(self._beat())

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
                return End(response.finished.reason == types_pb2.FINISH_REASON_STOP)
            case "heartbeat":
                liveness.check(response.heartbeat, f"verifier {self.worker.worker_id}")
                return Idle()
            case "moved":
                raise Moved(f"verifier {self.worker.worker_id} is going down")
            case event:
                raise self._broken(f"sent {event!r} in the middle of a session")

    async def durable(self, position: int) -> None:
        """Every token below `position` is in the log. The verifier is told a few times in each window."""
        if position - self._acknowledged >= self._start.window // ACKNOWLEDGEMENTS:
            self._acknowledged = position
            await self._send(verifier_pb2.DecodeRequest(durable=position))

    async def plan(self, plan: Plan) -> None:
        """Sends new ceilings."""
        await self._send(verifier_pb2.DecodeRequest(plan=plan_to_pb(plan)))

    def cancel(self) -> None:
        """Ends the call; the verifier starts no further step. A pending `next` raises CancelledError."""
        if self._beating is not None:
            self._beating.cancel()
        self._call.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._start.lease_s / BEATS)
            await self._send(verifier_pb2.DecodeRequest(heartbeat=types_pb2.Heartbeat()))

    def _say_how_long(self) -> None:
        self._goes_on = False
        again, took = len(self._start.tokens) - self.cached, time.monotonic() - self._began
        where = self.worker.worker_id
        log.info("session %s goes on at %s: %d tokens read again, %.3f s", self._start.session_id, where, again, took)

    def _commit(self, commit: verifier_pb2.DecodeCommit) -> Commit:
        if len(commit.gaps) != len(commit.tokens):
            raise self._broken(f"sent {len(commit.gaps)} gaps for {len(commit.tokens)} tokens")
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
        async with self._writing:
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
