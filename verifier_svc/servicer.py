"""The Verifier service: a router makes one Decode call for all of its generations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import grpc.aio

from outrider.config import VerifierConfig
from outrider.core.control.arms.steering import Steering
from outrider.core.session.contract import Plan
from outrider.core.session.digest import Prefix, extend
from outrider.core.tree.committed_window import settled_prefix
from outrider.engine.checkpoints.checkpoint import tokenizer_source
from outrider.engine.interface.engine import Engine
from outrider.errors import InvalidRequest, NotFound, TokenizerMismatch
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.place import Patience
from outrider.hub import checkpoint_folder
from outrider.offload import offload_if_long
from outrider.rpc.status import errors_as_status
from outrider.telemetry.tracing import Attributes
from outrider.upstream.servicer import UpstreamServicer
from outrider.v1 import types_pb2, verifier_pb2_grpc
from outrider.v1 import verifier_pb2 as pb
from outrider.wire.types import adapter_from_pb, check_tokens, contract_from_pb, plan_from_pb
from verifier_svc.adapters import AdapterStore
from verifier_svc.open_sessions import PREFILL
from verifier_svc.router_stream import RouterStream
from verifier_svc.scheduler import StepScheduler
from verifier_svc.session import SessionStart, VerifierSession

MAX_WINDOW = 4096  # tokens beyond the durable position
LEASE_MS = range(100, 600_001)  # leases that a router may request
SLOT_S = 0.25  # how long a start waits for a slot: a session that has just ended releases its slot a moment later

Requests = AsyncIterator[pb.DecodeRequest]
Context = grpc.aio.ServicerContext


class VerifierServicer(verifier_pb2_grpc.VerifierServicer):
    """Opens sessions for routers and sends them the commits."""

    def __init__(
        self,
        config: VerifierConfig,
        worker_id: str,
        engine: Engine,
        scheduler: StepScheduler,
        stream_servicer: UpstreamServicer,
    ) -> None:
        self._config = config
        self._worker_id = worker_id
        self._engine = engine
        self._scheduler = scheduler
        self._stream_servicer = stream_servicer
        self._grammars = GrammarCompiler(
            tokenizer_source(checkpoint_folder(config.model)),
            engine.unpadded_vocabulary,
            engine.eos_ids,
            patience=Patience(),
            eager=bool(engine.treeless),  # it cannot compute a row again
        )
        self._adapters = AdapterStore(engine, config.adapters, config.max_adapters)
        self._slot_queue = asyncio.Lock()  # starts wait for a slot in this order

    async def Decode(self, requests: Requests, context: Context[Any, Any]) -> None:
        """Serve all generations of one router."""
        async with errors_as_status(context):
            await RouterStream(self, self._scheduler).run(requests, context.write)

    async def open_session(self, start: pb.DecodeStart) -> VerifierSession:
        """Check a start and open its session. Raises InvalidRequest, NotFound and TokenizerMismatch, and as
        `OpenSessions.open`."""
        checked = await offload_if_long(start.tokens, self._check, start)
        if checked.contract.adapter is not None:
            checked = replace(checked, adapter=await self._adapters.get(checked.contract.adapter))
        if checked.contract.grammar is None:
            session = await self._open(checked)
        else:
            answer = checked.tokens[checked.answer_position :]
            grammar = await self._grammars.open(checked.contract.grammar, answer, checked.tenant)
            try:
                session = await self._open(replace(checked, grammar=grammar))
            except BaseException:
                grammar.close()
                raise
        self._stream_servicer.subscribe_waiting(session)
        return session

    def replan(self, session: VerifierSession, plan: Plan) -> None:
        """Has a session follow a newer plan."""
        session.terms.plan = plan
        self._scheduler.learning.steering.apply(self._scheduler.sessions.values())
        self._stream_servicer.sender.refresh(session)
        self._scheduler.wake()

    def attributes(self, session: VerifierSession) -> Attributes:
        """Return what the span of a traced session has."""
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

        Raises as `OpenSessions.open`.
        """
        if start.session_id in self._scheduler.sessions:  # the session's present slot is free for it
            return self._scheduler.sessions.open(start)
        with suppress(TimeoutError):
            async with asyncio.timeout(SLOT_S), self._slot_queue:
                while not self._scheduler.sessions.slots.free:
                    self._scheduler.sessions.freed.clear()
                    await self._scheduler.sessions.freed.wait()
                return self._scheduler.sessions.open(start)
        return self._scheduler.sessions.open(start)

    async def Warm(self, request: pb.WarmRequest, context: Context[Any, Any]) -> pb.WarmResponse:
        """Prefills a text for a session that may have to move here."""
        async with errors_as_status(context):
            tokens, known = await offload_if_long(request.tokens, self._checked_text, request)
            terms = adapter_from_pb(request.adapter) if request.HasField("adapter") else None
            contract = replace(PREFILL, adapter=terms)
            adapter = await self._adapters.get(contract.adapter)
            cached = await self._scheduler.sessions.prefill(tokens, request.tenant, known, contract, adapter)
            return pb.WarmResponse(cached=cached)

    async def ReadAdapter(self, request: pb.ReadAdapterRequest, context: Context[Any, Any]) -> pb.ReadAdapterResponse:
        """Read an adapter."""
        async with errors_as_status(context):
            self._check_model(request.model)
            found = await self._adapters.load(request.folder)
            return pb.ReadAdapterResponse(
                digest=bytes.fromhex(found.digest), rank=found.rank, parameters=found.parameters
            )

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
        """Describe this verifier: its model, its capacity and its state."""
        times = self._scheduler.learning.times.medians()
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
            dtype=self._engine.types,
            parameters=self._engine.parameters,
            step_costs=[
                pb.StepCost(tokens=tokens, microseconds=round(seconds * 1e6))
                for tokens, seconds in self._scheduler.learning.cost.points()
            ],
            refused_frames=self._stream_servicer.refused,
            numerics=self._engine.numerics,
            warm=self._scheduler.sessions.slots.warm,
            tasks=len(asyncio.all_tasks()),
            weight_bytes=self._engine.weight_bytes,
            kv_bytes=self._engine.kv_bytes,
            step_times=pb.StepTimes(
                rows=round(times.rows),
                forward_us=round(times.forward * 1e6),
                waited_us=round(times.waited * 1e6),
                overhead_us=round(times.overhead * 1e6),
            ),
            overlap_mode=self._scheduler.learning.steering.overlap_mode.value,
            control=_control(self._scheduler.learning.steering),
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
        self._check_model(start.model)
        if start.tokenizer_digest != self._engine.tokenizer_digest:
            raise TokenizerMismatch(
                f"tokenizer_digest: the router's tokenizer for '{start.model}' is not the checkpoint's own; "
                f"give the router the tokenizer.json of {self._config.model}"
            )
        if not start.tokens:
            raise InvalidRequest("tokens", "a session needs at least one token")
        check_tokens(start.tokens, self._engine.vocabulary)

    def _check_model(self, model: str) -> None:
        if model != self._config.model_name:
            raise NotFound(f"model '{model}' is not here; this verifier holds '{self._config.model_name}'")

    def _check(self, start: pb.DecodeStart) -> SessionStart:
        """Return the checked start. Take time in proportion to its text, and may be called in any thread."""
        self._check_text(start)
        if not 1 <= start.window <= MAX_WINDOW:
            raise InvalidRequest("window", f"is {start.window}, must be 1 to {MAX_WINDOW}")
        if start.lease_ms not in LEASE_MS:
            raise InvalidRequest("lease_ms", f"is {start.lease_ms}, must be {LEASE_MS.start} to {LEASE_MS.stop - 1}")
        contract = contract_from_pb(start.contract)
        contract.check_vocabulary(self._engine.vocabulary, self._engine.unpadded_vocabulary)
        if contract.grammar is not None and not {*contract.stop_ids} & {*self._engine.eos_ids}:
            raise InvalidRequest("stop_ids", "must have the model's end of text: an answer ends where its grammar does")
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
            session_id=start.session_id,
            tenant=start.tenant,
            epoch=start.epoch,
            tokens=tokens,
            answer_position=start.answer_position,
            contract=contract,
            plan=plan_from_pb(start.plan),
            window=start.window,
            known=known,
            scored=max(1, start.scored)
            if contract.prompt_logprobs is not None and start.scored < start.answer_position
            else None,
        )


def _control(steering: Steering) -> pb.Control:
    governor = steering.governor
    rate, error = steering.plain()
    return pb.Control(
        arm=str(governor.arm),
        reason=governor.reason,
        tokens_per_s=steering.tokens_per_s,
        plain_tokens_per_s=rate,
        plain_error=error,
        delay_budget_s=governor.budget.left_s,
        comparisons=[
            pb.ArmComparison(
                usual=str(usual),
                arm=str(arm),
                ratio=shown["ratio"],
                low=shown["low"] or 0.0,
                high=shown["high"] or 0.0,
            )
            for usual, arm, shown in governor.compared()
        ],
    )
