"""The Verifier service: the router makes one Decode call for each generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import grpc.aio

from outrider.config import VerifierConfig
from outrider.core.session.contract import Plan
from outrider.core.session.digest import Prefix, extend
from outrider.core.tree.committed_window import settled_prefix
from outrider.draft_server.servicer import DraftStreamServicer
from outrider.engine.engine import Engine
from outrider.errors import InvalidRequest, NotFound, Superseded, TokenizerMismatch, Unavailable
from outrider.offload import offload_if_long
from outrider.rpc import liveness
from outrider.rpc.codec import check_tokens, contract_from_pb, plan_from_pb, report_to_pb
from outrider.rpc.status import errors_as_status
from outrider.rpc.tracing import server_span
from outrider.telemetry.logs import session_context
from outrider.telemetry.tracing import Attributes
from outrider.v1 import types_pb2
from outrider.v1 import verifier_pb2 as pb
from outrider.v1.verifier_pb2_grpc import VerifierServicer
from verifier_svc.commit_queue import StepCommit
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import SessionStart, VerifierSession
from verifier_svc.tracing import TracedSteps

HALF_CLOSE_S = 5.0  # how long a router may take to close its side after the end
MAX_WINDOW = 4096  # tokens beyond the durable position
LEASE_MS = range(100, 600_001)  # that a router may request
SLOT_S = 0.25  # how long a start waits for a slot: a session that has just ended releases its slot a moment later

Requests = AsyncIterator[pb.DecodeRequest]
Context = grpc.aio.ServicerContext


class DecodeServicer(VerifierServicer):
    """Opens sessions for routers and sends them the commits."""

    def __init__(
        self,
        config: VerifierConfig,
        worker_id: str,
        engine: Engine,
        scheduler: StepScheduler,
        stream_servicer: DraftStreamServicer,
    ) -> None:
        self._config = config
        self._worker_id = worker_id
        self._engine = engine
        self._scheduler = scheduler
        self._stream_servicer = stream_servicer
        self._slot_queue = asyncio.Lock()  # starts wait for a slot in this order

    async def Decode(self, requests: Requests, context: Context[Any, Any]) -> None:
        """Serves one generation. However the call ends, the session is closed and its KV stays."""
        async with errors_as_status(context), server_span(context, "outrider.v1.Verifier/Decode") as call:
            first = await anext(liveness.monitored(requests, "the router"), None)
            if first is None or first.WhichOneof("command") != "start":
                raise InvalidRequest("start", "must be the first message of Decode")
            with session_context(first.start.session_id):
                session = await self._open(await offload_if_long(first.start.tokens, self._check, first.start))
                if call.span.is_recording():
                    session.traced = TracedSteps(call.span)
                    call.span.set_attributes(self._attributes(session))
                self._stream_servicer.subscribe_waiting(session)
                commands = asyncio.create_task(self._read_commands(session, requests, first.start.lease_ms / 1000))
                try:
                    await context.write(pb.DecodeResponse(started=pb.DecodeStarted(cached=session.kv_slot.cached)))
                    await self._write_commits(session, commands, context)
                finally:
                    call.completed = session.commits.answered
                    self._scheduler.close(session)
                    commands.cancel()
                    await asyncio.gather(commands, return_exceptions=True)

    def _attributes(self, session: VerifierSession) -> Attributes:
        return {
            "outrider.session.id": session.id,
            "outrider.epoch": session.epoch,
            "outrider.worker.id": self._worker_id,
            "outrider.tokens.cached": session.kv_slot.cached,
            "outrider.tokens.to_read": session.unread,
            "gen_ai.request.model": self._config.model_name,
        }

    async def _open(self, start: SessionStart) -> VerifierSession:
        """Open a session; wait up to SLOT_S for a free slot, in the order of arrival, so that no router is starved.

        Raises as `StepScheduler.open`.
        """
        if start.session_id in self._scheduler.sessions:  # the session's present slot is free for it
            return self._scheduler.open(start)
        with suppress(TimeoutError):
            async with asyncio.timeout(SLOT_S), self._slot_queue:
                while not self._scheduler.slots.free:
                    self._scheduler.freed.clear()
                    await self._scheduler.freed.wait()
                return self._scheduler.open(start)
        return self._scheduler.open(start)

    async def Warm(self, request: pb.WarmRequest, context: Context[Any, Any]) -> pb.WarmResponse:
        """Prefills a text for a session that may have to move here."""
        async with errors_as_status(context):
            tokens, known = await offload_if_long(request.tokens, self._checked_text, request)
            return pb.WarmResponse(cached=await self._scheduler.prefill(tokens, request.tenant, known))

    async def Watch(self, request: pb.WatchRequest, context: Context[Any, Any]) -> None:
        """Streams a session's steps until the session ends here."""
        async with errors_as_status(context):
            session = self._scheduler.sessions.get(request.session_id)
            if session is None:
                raise NotFound(f"session {request.session_id} does not decode here")
            async with aclosing(session.broadcast.steps()) as steps:
                async for step in steps:
                    await context.write(step)

    async def Describe(self, request: types_pb2.DescribeRequest, context: Context[Any, Any]) -> pb.VerifierDescription:
        """Describes this verifier: its model, its capacity and its state."""
        times = self._scheduler.times.medians()
        return pb.VerifierDescription(
            worker_id=self._worker_id,
            model=self._config.model_name,
            tokenizer_digest=self._engine.tokenizer_digest,
            vocabulary=self._engine.vocabulary,
            context=self._engine.context,
            slots=self._engine.slots,
            sessions=len(self._scheduler.sessions),
            drafters=self._stream_servicer.streams,
            steps=self._scheduler.progress.steps,
            dtype=self._engine.dtype,
            parameters=self._engine.parameters,
            step_costs=[
                pb.StepCost(tokens=tokens, microseconds=round(seconds * 1e6))
                for tokens, seconds in self._scheduler.cost.points()
            ],
            refused_frames=self._stream_servicer.refused,
            numerics=self._engine.numerics,
            warm=self._scheduler.slots.warm,
            tasks=len(asyncio.all_tasks()),
            weight_bytes=self._engine.weight_bytes,
            kv_bytes=self._engine.kv_bytes,
            step_times=pb.StepTimes(
                rows=round(times.rows),
                forward_us=round(times.forward * 1e6),
                waited_us=round(times.waited * 1e6),
                overhead_us=round(times.overhead * 1e6),
            ),
            overlap_mode=self._scheduler.hold_policy.overlap_mode.value,
            treeless=self._engine.treeless,
            ranks=self._engine.ranks,
        )

    def _checked_text(self, request: pb.WarmRequest) -> tuple[tuple[int, ...], Prefix]:
        self._check_text(request)
        if len(request.tokens) > self._engine.context:
            raise InvalidRequest("tokens", f"are more than the context of {self._engine.context}")
        tokens = tuple(request.tokens)
        return tokens, settled_prefix(tokens)

    def _check_text(self, start: pb.DecodeStart | pb.WarmRequest) -> None:
        if start.model != self._config.model_name:
            raise NotFound(f"model '{start.model}' is not here; this verifier holds '{self._config.model_name}'")
        if start.tokenizer_digest != self._engine.tokenizer_digest:
            raise TokenizerMismatch(
                f"tokenizer_digest: the router's tokenizer for '{start.model}' is not the checkpoint's own; "
                f"give the router the tokenizer.json of {self._config.model}"
            )
        if not start.tokens:
            raise InvalidRequest("tokens", "a session needs at least one token")
        check_tokens(start.tokens, self._engine.vocabulary)

    def _check(self, start: pb.DecodeStart) -> SessionStart:
        """Return the checked start. Takes time in proportion to its text, and may be called in any thread."""
        self._check_text(start)
        if not 1 <= start.window <= MAX_WINDOW:
            raise InvalidRequest("window", f"is {start.window}, must be 1 to {MAX_WINDOW}")
        if start.lease_ms not in LEASE_MS:
            raise InvalidRequest("lease_ms", f"is {start.lease_ms}, must be {LEASE_MS.start} to {LEASE_MS.stop - 1}")
        contract = contract_from_pb(start.contract)
        contract.check_vocabulary(self._engine.vocabulary, self._engine.unpadded_vocabulary)
        if not start.answer_position <= len(start.tokens) < start.answer_position + contract.max_tokens:
            raise InvalidRequest(
                "answer_position", "must be at most the number of tokens, and leave room for one more token"
            )
        if start.answer_position + contract.max_tokens > self._engine.context:
            raise InvalidRequest(
                "max_tokens",
                f"{start.answer_position} tokens of prompt and {contract.max_tokens} of answer are more than "
                f"the context of {self._engine.context}",
            )
        tokens = tuple(start.tokens)
        known = settled_prefix(tokens)
        if extend(known.digest, tokens[known.length :]) != start.digest:
            raise InvalidRequest("digest", "does not fit the tokens")
        return SessionStart(
            start.session_id,
            start.tenant,
            start.epoch,
            tokens,
            start.answer_position,
            contract,
            plan_from_pb(start.plan),
            start.window,
            known,
        )

    async def _read_commands(self, session: VerifierSession, requests: Requests, lease_s: float) -> None:
        """Applies the router's commands until the router cancels or closes its side. Raises Unavailable after a lease
        of silence.
        """
        async for request in liveness.monitored(requests, "the router", lease_s):
            command = request.WhichOneof("command")
            if command == "durable":
                if request.durable > len(session.tokens):
                    raise InvalidRequest("durable", f"is {request.durable}, only {len(session.tokens)} are committed")
                session.commits.acknowledge(request.durable)
                self._scheduler.wake()
            elif command == "plan":
                plan = plan_from_pb(request.plan)
                if plan.version > session.terms.plan.version:
                    self._replan(session, plan)
            elif command == "cancel":
                return
            elif command != "heartbeat":
                raise InvalidRequest("command", f"'{command}' is not allowed here")

    def _replan(self, session: VerifierSession, plan: Plan) -> None:
        session.terms.plan = plan
        self._stream_servicer.refresh(session)
        self._scheduler.wake()

    async def _write_commits(
        self, session: VerifierSession, commands: asyncio.Task[None], context: Context[Any, Any]
    ) -> None:
        """Writes commits until the generation ends, the router cancels it, or a higher epoch fences it."""
        commands.add_done_callback(lambda _: session.commits.close())
        while commit := await self._next(session, context):
            await context.write(_response(session, commit))
            if commit.last:
                break
        else:
            if session.commits.fenced:
                raise Superseded(f"session {session.id} was taken over under a higher epoch")
            if not session.commits.moved:
                return commands.result()
            return await self._write_last(session, pb.DecodeResponse(moved=pb.DecodeMoved()), commands, context)
        stopped = session.tokens[-1] in session.contract.stop_ids
        reason = types_pb2.FINISH_REASON_STOP if stopped else types_pb2.FINISH_REASON_LENGTH
        finished = pb.DecodeResponse(finished=pb.DecodeFinished(reason=reason))
        return await self._write_last(session, finished, commands, context)

    async def _write_last(
        self,
        session: VerifierSession,
        message: pb.DecodeResponse,
        commands: asyncio.Task[None],
        context: Context[Any, Any],
    ) -> None:
        session.commits.answered = True
        await context.write(message)
        # The router closes its side first: a router's write that met the end of the call would fail the call.
        try:
            async with asyncio.timeout(HALF_CLOSE_S):
                return await commands
        except TimeoutError:
            raise Unavailable(f"the router did not close its side of Decode within {HALF_CLOSE_S:g} s") from None

    async def _next(self, session: VerifierSession, context: Context[Any, Any]) -> StepCommit | None:
        """Return the session's next commit, or None when it was closed; send heartbeats while waiting."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(liveness.HEARTBEAT_S):
                    return await session.commits.get()
            await context.write(pb.DecodeResponse(heartbeat=self._scheduler.progress.heartbeat()))


def _response(session: VerifierSession, commit: StepCommit) -> pb.DecodeResponse:
    return pb.DecodeResponse(
        commit=pb.DecodeCommit(
            epoch=session.epoch,
            position=commit.position,
            tokens=[choice.token for choice in commit.choices],
            gaps=[choice.gap for choice in commit.choices],
            digest=commit.digest,
            report=report_to_pb(commit.report),
            logprobs=b"".join(choice.logprobs for choice in commit.choices),
            credits=[
                pb.DrafterCredit(
                    drafter_id=credit.drafter_id,
                    verified=credit.verified,
                    accepted=credit.accepted,
                    alone=credit.alone,
                )
                for credit in commit.credits
            ],
        )
    )
