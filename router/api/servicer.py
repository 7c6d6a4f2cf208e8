"""The Inference service: requests become generations, and their events messages."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio

from outrider.errors import InvalidRequest, NotFound
from outrider.limits.fair_queue import AdmissionTicket, QueueClass
from outrider.rpc.status import errors_as_status
from outrider.rpc.tracing import ServedCall, server_span
from outrider.store.sessions import SessionRecord
from outrider.store.tenant_storage import SESSION_BYTES
from outrider.v1 import inference_pb2 as pb
from outrider.v1.inference_pb2_grpc import InferenceServicer
from router.api.answer_streams import NAME_BYTES, AnswerStreams, AnswerWriter
from router.api.auth import caller_tenant
from router.api.messages import adapter_to_pb, session_to_pb
from router.api.running_calls import RunningCalls
from router.api.tokenizing import detokenize, tokenize
from router.counters.request_metrics import RequestMetrics
from router.reporting.step_stream import StepStreams
from router.requests.requests import GenerateParams, find_model, parse
from router.requests.served_models import ServedModel
from router.scheduling.admission import OUTPUT_WEIGHT, AnswerLimit, FollowerLimit
from router.scheduling.workers import WorkerPool
from router.sessions.context import RouterContext
from router.sessions.session_open import GenerationOpener, RequestRuns
from router.sessions.takeover import ClientPosition, Takeovers, open_record, resumed_policy

MAX_INCOMPATIBLE = 64  # workers of no use that a model's description names
STALE_S = 0.05  # after this time in the queue a session's record is read again

Context = grpc.aio.ServicerContext


class GenerateServicer(InferenceServicer):
    """Translates requests to generations, and their events to messages."""

    def __init__(self, router: RouterContext) -> None:
        store, pool, self._config = router.store, router.decoding.worker_pool, router.decoding.config
        self._router = router
        self._takeovers = Takeovers(
            store=store,
            models=router.models,
            turns=router.turns,
            background=router.decoding.background,
            policy=partial(resumed_policy, self._config, router.warm_start),
        )
        self._opener = GenerationOpener(store=store, worker_pool=pool, takeovers=self._takeovers)
        self.calls = RunningCalls(router, self._takeovers)
        self._answers = AnswerLimit(self._config)
        self._followers = FollowerLimit(self._config)
        self._answer_streams = AnswerStreams()
        self.steps = StepStreams(store=store, models=router.models, worker_pool=pool)

    async def Generate(self, request: pb.GenerateRequest, context: Context[Any, Any]) -> None:
        """Run one generation for as long as the call lasts."""
        async with self._measured(context, "Generate", "text_completion") as metrics:
            arrived = time.monotonic()
            tenant = caller_tenant()
            remaining = context.time_remaining()
            deadline = math.inf if remaining is None else arrived + remaining
            session = await self._find_session(tenant, request.session_id)
            requested = await self._router.adapters.resolve(tenant, request.model)
            params = parse(
                request,
                self._router.models,
                self._config,
                session,
                self._router.warm_start.priors,
                tenant=tenant,
                longest_context=self._router.decoding.worker_pool.longest_context,
                requested=requested,
            )
            metrics.on_parsed(params)
            session_id, route = request.session_id, self._route(request.route)
            del request  # it may have megabytes, and what follows may wait for long
            async with (
                AsyncExitStack() as answering,
                self._answer_streams.writer(tenant, route, context) as writer,
                self.calls.outbox() as outbox,
                AsyncExitStack() as stack,
            ):
                pending = stack.enter_context(self.calls.pending.register(tenant, session_id))
                admitted, opened = await stack.enter_async_context(AsyncExitStack()), None
                ticket = self._ticket(params, remaining)
                while opened is None:
                    slot = await pending.wait_for(admitted.enter_async_context(self._router.admission.slot(ticket)))
                    metrics.on_admitted(slot.since)
                    answering.enter_context(self._answers.hold(tenant))
                    if session is not None and time.monotonic() - arrived > STALE_S:
                        session = await self._find_session(tenant, session_id)
                    try:
                        opened = await self._opener.begin(params, session, deadline)
                    except RequestRuns as running:
                        await admitted.aclose()
                        await answering.aclose()
                        await pending.wait_for(self._follow(tenant, running.session_id, writer))
                        ticket = replace(ticket, priority=QueueClass.RESUMED)
                opened.response.usage.add_wait(slot.since - arrived)
                slot.spend(prompt=opened.response.start)
                opened = replace(opened, returns_prompt=params.returns_prompt)
                await self.calls.run(opened, slot, outbox, writer, metrics, pending)

    async def Resume(self, request: pb.ResumeRequest, context: Context[Any, Any]) -> None:
        """Resume a generation, whichever router owned it."""
        async with self._measured(context, "Resume", "resume") as metrics, AsyncExitStack() as stack:
            tenant = caller_tenant()
            stack.enter_context(self._answers.hold(tenant))
            writer = await stack.enter_async_context(
                self._answer_streams.writer(tenant, self._route(request.route), context)
            )
            outbox = await stack.enter_async_context(self.calls.outbox())
            found = await self._takeovers.find(
                tenant,
                request.session_id,
                request.generation,
                ClientPosition(request.next_position, request.text_offset),
            )
            slot = None
            if not found.record.finished:
                ticket = AdmissionTicket(
                    found.model.name, tenant, QueueClass.RESUMED, 0.0, self._deadline_at(context.time_remaining())
                )
                running = self.calls.running.get(request.session_id)
                handed_on = running is not None and running.hand_on_slot()
                slot = await stack.enter_async_context(self._router.admission.slot(ticket, handed_on=handed_on))
                metrics.on_admitted(slot.since)
            opened = await self._takeovers.take(found)
            self._router.admission.rates.count_replayed(tenant, opened.response.position - opened.client.position)
            self._router.decoding.metrics.resumes += 1
            await self.calls.run(opened, slot, outbox, writer, metrics)

    async def Answers(self, requests: AsyncIterator[pb.AnswersRequest], context: Context[Any, Any]) -> None:
        """Carry the events of many generations together."""
        async with errors_as_status(context):
            await self._answer_streams.serve(caller_tenant(), requests, context)

    async def Cancel(self, request: pb.CancelRequest, context: Context[Any, Any]) -> pb.CancelResponse:
        """End a generation, wherever it runs."""
        async with errors_as_status(context), self._span(context, "Cancel"):
            tenant = caller_tenant()
            await self.calls.cancel(tenant, request.session_id, discard=request.discard)
            await self._takeovers.end(tenant, request.session_id, discard=request.discard)  # another router may run it
            return pb.CancelResponse()

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context[Any, Any]) -> pb.Session:
        """Create an empty session."""
        async with errors_as_status(context):
            tenant = caller_tenant()
            requested = await self._router.adapters.resolve(tenant, request.model)
            if requested.adapter is not None:
                raise InvalidRequest(
                    "model", "is an adapter, which a session gets with its first generation; create it for the model"
                )
            model = find_model(requested.name, self._router.models)
            session_id = secrets.token_hex(16)
            await self._router.store.storage.reserve(tenant, session_id, 0, SESSION_BYTES, new=True)
            await self._router.store.sessions.create(session_id, tenant, model.name, model.digest)
            return session_to_pb(await self._router.store.sessions.get(session_id))

    async def GetSession(self, request: pb.GetSessionRequest, context: Context[Any, Any]) -> pb.Session:
        """Return a session's description."""
        async with errors_as_status(context):
            tenant = caller_tenant()
            return session_to_pb(await open_record(self._router.store.sessions, tenant, request.session_id))

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context[Any, Any]
    ) -> pb.CloseSessionResponse:
        """End a session and drop its log."""
        async with errors_as_status(context):
            tenant = caller_tenant()
            with suppress(NotFound):  # for example closed before
                await self._router.store.sessions.get(request.session_id, tenant)
                await self.calls.cancel(tenant, request.session_id)
                await self._router.store.sessions.close(request.session_id)
                await self._router.store.storage.forget(tenant, request.session_id)
                self._router.decoding.background.spawn(self._router.store.events.publish(request.session_id))
            return pb.CloseSessionResponse()

    async def Watch(self, request: pb.WatchSessionRequest, context: Context[Any, Any]) -> None:
        """Stream a session's steps, with their texts, until it is closed or the call ends."""
        async with errors_as_status(context):
            tenant = caller_tenant()
            async with aclosing(self.steps.steps(tenant, request.session_id)) as steps:
                async for step in steps:
                    await context.write(step)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context[Any, Any]) -> pb.ListModelsResponse:
        """List the models that have a verifier."""
        async with errors_as_status(context):
            listed = [
                await _describe(model, self._router.decoding.worker_pool) for model in self._router.models.values()
            ]
            for named in await self._router.adapters.listed(caller_tenant()):
                of_model = (model for model in listed if model.name == named.model)
                next(of_model).adapters.append(adapter_to_pb(named))
            return pb.ListModelsResponse(models=[model for model in listed if model.verifiers])

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context[Any, Any]) -> pb.ModelAdapter:
        """Load an adapter, for requests from then on."""
        async with errors_as_status(context):
            model = find_model(request.model, self._router.models)
            return adapter_to_pb(
                await self._router.adapters.load(caller_tenant(), request.name, request.folder, model.name)
            )

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: Context[Any, Any]
    ) -> pb.UnloadAdapterResponse:
        """Take an adapter's name away."""
        async with errors_as_status(context):
            await self._router.adapters.unload(caller_tenant(), request.name)
            return pb.UnloadAdapterResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context[Any, Any]) -> pb.TokenizeResponse:
        """Return a prompt's tokens."""
        async with errors_as_status(context), self._span(context, "Tokenize"):
            return await tokenize(request, self._router, caller_tenant())

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context[Any, Any]) -> pb.DetokenizeResponse:
        """Return the text of tokens."""
        async with errors_as_status(context), self._span(context, "Detokenize"):
            return await detokenize(request, self._router, caller_tenant())

    async def KeepResponse(
        self, request: pb.KeepResponseRequest, context: Context[Any, Any]
    ) -> pb.KeepResponseResponse:
        """Keep a conversation."""
        async with errors_as_status(context):
            await self._router.store.responses.keep(caller_tenant(), request.id, request.items)
            return pb.KeepResponseResponse()

    async def FindResponse(
        self, request: pb.FindResponseRequest, context: Context[Any, Any]
    ) -> pb.FindResponseResponse:
        """Return a conversation that was kept."""
        async with errors_as_status(context):
            return pb.FindResponseResponse(items=await self._router.store.responses.find(caller_tenant(), request.id))

    async def CheckKey(self, request: pb.CheckKeyRequest, context: Context[Any, Any]) -> pb.CheckKeyResponse:
        """Return the tenant of the caller's key, which was judged before."""
        async with errors_as_status(context):
            return pb.CheckKeyResponse(tenant=caller_tenant())

    async def _find_session(self, tenant: str, session_id: str) -> SessionRecord | None:
        return await open_record(self._router.store.sessions, tenant, session_id) if session_id else None

    async def _follow(self, tenant: str, session_id: str, writer: AnswerWriter) -> None:
        """Wait while another call runs the same request. Raises Overloaded where too many wait, Moved when this router
        shuts down."""
        with self._followers.hold(tenant):
            await writer.write(pb.GenerateResponse(following=pb.Following()))
            await self._opener.ended_or_ownerless(session_id, closed=lambda: self._router.admission.closed)

    def _route(self, route: pb.AnswerRoute) -> tuple[bytes, int] | None:
        """Return the stream and the handle that a call's events go to; None: they go on the call itself.

        It is a copy, because a part of a request keeps all of it in memory.
        """
        if len(route.stream) != NAME_BYTES:
            return None
        return bytes(route.stream), route.handle

    def _ticket(self, params: GenerateParams, remaining: float | None) -> AdmissionTicket:
        tokens = params.estimated_prompt_tokens + OUTPUT_WEIGHT * params.estimated_output_tokens
        return AdmissionTicket(params.model.name, params.tenant, params.priority, tokens, self._deadline_at(remaining))

    def _deadline_at(self, remaining: float | None) -> float | None:
        """Return a deadline by admission's clock."""
        return None if remaining is None else self._router.admission.clock() + remaining

    @asynccontextmanager
    async def _measured(self, context: Context[Any, Any], method: str, operation: str) -> AsyncIterator[RequestMetrics]:
        """Yield a call's metrics: errors become statuses, and the span and the metrics are recorded at its end."""
        with self.calls.counted():
            async with errors_as_status(context), self._span(context, method) as call:
                with self._router.decoding.metrics.request(call.span, operation) as metrics:
                    yield metrics

    def _span(self, context: Context[Any, Any], method: str) -> AbstractAsyncContextManager[ServedCall]:
        return server_span(context, f"outrider.v1.Inference/{method}", trusted=self._config.trust_traces)


async def _describe(model: ServedModel, worker_pool: WorkerPool) -> pb.Model:
    verifiers = [
        worker for worker in await worker_pool.verifiers(model.name) if worker.tokenizer_digest == model.digest
    ]
    return pb.Model(
        name=model.name,
        context=max((worker.context for worker in verifiers), default=0),
        vocabulary=max((worker.vocabulary for worker in verifiers), default=0),
        tokenizer_digest=model.digest,
        verifiers=len(verifiers),
        drafters=len(await worker_pool.drafters(model.digest)),
        misfits=[f"{worker.worker_id}: {why}" for worker, why in worker_pool.misfits(model.name)[:MAX_INCOMPATIBLE]],
    )
