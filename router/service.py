"""The Inference service, and how a router starts: loads tokenizers, serves until cancelled."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

import grpc.aio

from outrider.config import RouterConfig
from outrider.core.tiers import TierChoice
from outrider.errors import Cancelled, Moved, NotFound, Superseded
from outrider.rpc.server import serving
from outrider.rpc.spans import served
from outrider.rpc.status import translated
from outrider.rpc.supervision import supervising
from outrider.rpc.tls import Tls, is_loopback
from outrider.store.client import connect, ping
from outrider.store.keys import Keys
from outrider.store.lessons import share
from outrider.store.registry import Registry
from outrider.store.sessions import SessionRecord, Sessions
from outrider.store.tickets import ticket_key
from outrider.telemetry.logs import about
from outrider.telemetry.metrics import watch
from outrider.telemetry.process import telling
from outrider.v1 import inference_pb2 as pb
from outrider.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from router import opening
from router.admission import GOING_DOWN, OUTPUT_WEIGHT, Admission, Answers, Place
from router.background import Background
from router.beginnings import Beginning, Beginnings
from router.callers import Anybody, Callers, Keyholders
from router.chores import look_after, sweep
from router.fair_queue import Claim, Priority
from router.fleet import Fleet
from router.generation import Generation
from router.lessons import Lessonbook
from router.live import pages
from router.messages import event_to_pb, session_to_pb
from router.models import ServedModel, load_model
from router.opening import Cluster, Opened
from router.outbox import Event, Outbox
from router.requests import Ask, named, parse
from router.teaching import Teaching
from router.telling import Metrics, Request, mean
from router.watching import watched

_CLEAN_UP_S = 5.0  # for what ended generations still have to tell others
MISFITS = 64  # drafters of no use that a model's description names
STALE_S = 0.05  # after so long in the queue a session is looked at again

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext


class Inference(InferenceServicer):
    """Translates: requests to generations, their events to messages."""

    def __init__(self, cluster: Cluster, callers: Callers) -> None:
        self._cluster = cluster
        self._callers = callers
        self._leaving = False
        self._beginnings = Beginnings()
        self._answers = Answers(cluster.config)
        self._outboxes: set[Outbox] = set()
        self._answering = 0  # calls that answer
        self._silent = asyncio.Event()  # there is none
        self._silent.set()
        self.running: dict[str, Generation] = {}

    async def Generate(self, request: pb.GenerateRequest, context: Context[Any, Any]) -> None:
        """One generation, for as long as the call lasts."""
        async with self._told(context, "Generate", "text_completion") as told:
            arrived = time.monotonic()
            tenant = await self._callers.tenant(context)
            remaining = context.time_remaining()
            deadline = None if remaining is None else time.time() + remaining
            held = await self._held(tenant, request)
            ask = parse(
                request, self._cluster.models, self._cluster.config, held, self._cluster.lessons.of, tenant=tenant
            )
            told.asked(ask)
            async with AsyncExitStack() as answering, self._outbox() as outbox, AsyncExitStack() as stack:
                beginning = stack.enter_context(self._beginnings.of(tenant, request.session_id))
                claimed = stack.enter_async_context(self._cluster.admission.place(self._claim(ask, remaining)))
                place = await beginning.wait_for(claimed)
                told.placed(place.since)
                answering.enter_context(self._answers.one_more(tenant))
                if held is not None and time.monotonic() - arrived > STALE_S:
                    held = await self._held(tenant, request)
                opened = await opening.begin(self._cluster, ask, held, deadline)
                opened.answer.figures.waited(place.since - arrived)
                place.spend(read=opened.answer.start)
                await self._run(opened, place, outbox, context, told, beginning)

    async def Resume(self, request: pb.ResumeRequest, context: Context[Any, Any]) -> None:
        """Goes on with a generation, whoever had it."""
        async with self._told(context, "Resume", "resume") as told, AsyncExitStack() as stack:
            tenant = await self._callers.tenant(context)
            stack.enter_context(self._answers.one_more(tenant))
            outbox = await stack.enter_async_context(self._outbox())
            found = await opening.find(
                self._cluster,
                tenant,
                request.session_id,
                request.generation,
                request.next_position,
                request.text_offset,
            )
            place = None
            if not found.record.finished:
                claim = Claim(found.model.name, tenant, Priority.RESUMED, 0.0, self._by(context.time_remaining()))
                running = self.running.get(request.session_id)
                ours = running is not None and running.hands_on()
                place = await stack.enter_async_context(self._cluster.admission.place(claim, holds_one=ours))
                told.placed(place.since)
            opened = await opening.take(self._cluster, found)
            self._cluster.metrics.resumes += 1
            await self._run(opened, place, outbox, context, told)

    async def Cancel(self, request: pb.CancelRequest, context: Context[Any, Any]) -> pb.CancelResponse:
        """Ends a generation, wherever it runs."""
        async with translated(context), served(context, "outrider.v1.Inference/Cancel"):
            tenant = await self._callers.tenant(context)
            await self._cancel(tenant, request.session_id)
            await opening.end(self._cluster, tenant, request.session_id)  # it may run elsewhere, and ours not know it
            return pb.CancelResponse()

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Context[Any, Any]) -> pb.Session:
        """An empty session."""
        async with translated(context):
            tenant = await self._callers.tenant(context)
            model = named(request.model, self._cluster.models)
            session_id = secrets.token_hex(16)
            await self._cluster.sessions.create(session_id, tenant, model.name, model.digest)
            return session_to_pb(await self._cluster.sessions.get(session_id))

    async def GetSession(self, request: pb.GetSessionRequest, context: Context[Any, Any]) -> pb.Session:
        """What is known of a session."""
        async with translated(context):
            tenant = await self._callers.tenant(context)
            return session_to_pb(await opening.open_record(self._cluster.sessions, tenant, request.session_id))

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context[Any, Any]
    ) -> pb.CloseSessionResponse:
        """Ends a session and forgets its log."""
        async with translated(context):
            tenant = await self._callers.tenant(context)
            with suppress(NotFound):  # as of one that was closed before
                await self._cluster.sessions.get(request.session_id, tenant)
                await self._cancel(tenant, request.session_id)
                await self._cluster.sessions.close(request.session_id)
            return pb.CloseSessionResponse()

    async def Watch(self, request: pb.WatchSessionRequest, context: Context[Any, Any]) -> None:
        """A session's steps, with their texts, until it is closed or nobody watches any more."""
        async with translated(context):
            tenant = await self._callers.tenant(context)
            async with aclosing(watched(self._cluster, tenant, request.session_id)) as steps:
                async for step in steps:
                    await context.write(step)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context[Any, Any]) -> pb.ListModelsResponse:
        """The models that have a verifier."""
        async with translated(context):
            await self._callers.tenant(context)
            listed = [await self._describe(model) for model in self._cluster.models.values()]
            return pb.ListModelsResponse(models=[model for model in listed if model.verifiers])

    async def _cancel(self, tenant: str, session_id: str) -> None:
        """Cancels the generation of a tenant's session, if it runs here or is about to."""
        await self._beginnings.cancel(tenant, session_id)
        generation = self.running.get(session_id)
        if generation is not None and generation.tenant == tenant:
            await generation.cancel()

    def leave(self) -> None:
        """Has everything that runs go on at another router, and what comes."""
        self._leaving = True
        self._cluster.admission.close()
        for generation in self.running.values():
            generation.move()
        for outbox in self._outboxes:
            outbox.hurry(Moved(GOING_DOWN))

    async def left(self) -> None:
        """Returns once no call answers any more."""
        await self._silent.wait()

    async def _held(self, tenant: str, request: pb.GenerateRequest) -> SessionRecord | None:
        sessions = self._cluster.sessions
        return await opening.open_record(sessions, tenant, request.session_id) if request.session_id else None

    def _claim(self, ask: Ask, remaining: float | None) -> Claim:
        tokens = ask.roughly + OUTPUT_WEIGHT * ask.likely
        return Claim(ask.model.name, ask.tenant, ask.priority, tokens, self._by(remaining))

    def _by(self, remaining: float | None) -> float | None:
        """A deadline by the clock of admission."""
        return None if remaining is None else self._cluster.admission.clock() + remaining

    @asynccontextmanager
    async def _told(self, context: Context[Any, Any], method: str, operation: str) -> AsyncIterator[Request]:
        """Around a call that answers: its errors become statuses, its span and its figures are told."""
        self._answering += 1
        self._silent.clear()
        try:
            async with translated(context), served(context, f"outrider.v1.Inference/{method}") as call:
                with self._cluster.metrics.request(call.span, operation) as told:
                    yield told
        finally:
            self._answering -= 1
            if not self._answering:
                self._silent.set()

    @asynccontextmanager
    async def _outbox(self) -> AsyncIterator[Outbox]:
        """What a call's client is sent. At the end of the body all of it is, or the client does not read."""
        outbox = Outbox(self._cluster.config.window)
        self._outboxes.add(outbox)
        try:
            async with outbox:
                if self._leaving:
                    outbox.hurry(Moved(GOING_DOWN))
                yield outbox
        finally:
            self._outboxes.discard(outbox)

    async def _run(
        self,
        opened: Opened,
        place: Place | None,
        outbox: Outbox,
        context: Context[Any, Any],
        told: Request,
        beginning: Beginning | None = None,
    ) -> None:
        before = self.running.get(opened.record.session_id)
        if opened.ledger is not None and before is not None:
            if before.epoch > opened.ledger.epoch:  # that call was faster
                raise Superseded(f"session {before.session_id} was taken over under epoch {before.epoch}; do not retry")
            before.supersede(opened.ledger.epoch)
        outbox.begin(partial(_send, context, opened), opened.position, opened.text_offset)
        generation = Generation(self._cluster, opened, place, outbox)
        told.begun(generation)
        if self._leaving:
            generation.move()
        if opened.ledger is not None:
            self.running[generation.session_id] = generation
        if beginning is not None:
            beginning.over.set()
            if beginning.cancelled:
                generation.stop()
        try:
            with about(generation.session_id):
                await generation.run()
            told.ended(generation)
        finally:
            if self.running.get(generation.session_id) is generation:
                del self.running[generation.session_id]

    async def _describe(self, model: ServedModel) -> pb.Model:
        fleet = self._cluster.fleet
        verifiers = [worker for worker in await fleet.verifiers(model.name) if worker.tokenizer_digest == model.digest]
        return pb.Model(
            name=model.name,
            context=max((worker.context for worker in verifiers), default=0),
            vocabulary=max((worker.vocabulary for worker in verifiers), default=0),
            tokenizer_digest=model.digest,
            verifiers=len(verifiers),
            drafters=len(await fleet.drafters(model.digest)),
            misfits=[f"{worker.worker_id}: {why.explanation}" for worker, why in fleet.misfits(model.name)[:MISFITS]],
        )


async def run(config: RouterConfig, redis_url: str, *, announce: Callable[[str], None]) -> None:
    """Serves until cancelled. `announce` hears the bound address once calls are answered.

    On cancellation new calls are refused and running ones end as moved; what has not within `drain_s` is cut off.

    Raises CheckpointError for a tokenizer or chat template that cannot be loaded, Unavailable when Redis cannot be
    reached at the start, ConfigError for an address that cannot be bound.
    """
    models: dict[str, ServedModel] = {}
    try:
        for name, checkpoint in config.models.items():
            models[name] = await asyncio.to_thread(load_model, name, checkpoint)
        await _serve(config, models, redis_url, announce)
    finally:
        for model in models.values():
            await asyncio.to_thread(model.close)


async def _serve(
    config: RouterConfig, models: Mapping[str, ServedModel], redis_url: str, announce: Callable[[str], None]
) -> None:
    client = connect(redis_url)
    tls = Tls.read(config.ca, config.cert, config.key)
    if config.auth == "keys" and tls is None and not is_loopback(config.listen.rpartition(":")[0]):
        log.warning(
            "API keys cross the network in the clear on %s: give this router a certificate (ca, cert and key), or "
            "listen on 127.0.0.1 behind something that speaks TLS",
            config.listen,
        )
    fleet = Fleet(Registry(client), config.zone, tls)
    background = Background()
    admission = Admission(config, fleet.places)
    cluster = Cluster(
        router_id=f"router-{secrets.token_hex(4)}",
        config=config,
        models=models,
        fleet=fleet,
        sessions=Sessions(client, ttl_s=config.session_ttl_s, lease_s=config.lease_s, resume_ttl_s=config.resume_ttl_s),
        background=background,
        admission=admission,
        tiers=TierChoice(measured=config.tiers == "measured"),
        ticket_key=partial(ticket_key, client),
        lessons=Lessonbook(partial(share, client), fleet.drafting),
        teaching=Teaching(client, config.teaches),
        metrics=Metrics(),
    )
    service = Inference(cluster, Keyholders(Keys(client)) if config.auth == "keys" else Anybody())

    watch("outrider.requests.running", lambda: len(service.running))
    watch("outrider.queue.depth", admission.depths)
    watch("outrider.gamma", lambda: mean([one.plan.depth for one in tuple(service.running.values())]))
    watch("outrider.workers", fleet.counts)

    def register(server: grpc.aio.Server) -> list[str]:
        add_InferenceServicer_to_server(service, server)
        return [pb.DESCRIPTOR.services_by_name["Inference"].full_name]

    try:
        await ping(client)
        shown = pages(cluster, lambda: tuple(service.running.values()))
        with telling("router", cluster.router_id, config.metrics, shown):
            async with (
                supervising() as chores,
                serving(
                    config.listen,
                    register,
                    drain_s=config.drain_s,
                    leave=service.leave,
                    left=service.left,
                    tls=tls,
                    mutual=False,
                    probes=config.health,
                ) as address,
            ):
                chores.keep("fleet", partial(look_after, fleet, admission))
                chores.keep("sweep", partial(sweep, cluster.sessions))
                chores.keep("lessons", cluster.lessons.keep)
                chores.keep("teaching", cluster.teaching.keep)
                announce(address)
                await asyncio.Event().wait()
    finally:
        # The server forgets calls that were cancelled; their handlers may still be on their way out.
        await asyncio.gather(*(generation.ended.wait() for generation in service.running.values()))
        await background.drain(_CLEAN_UP_S)
        await fleet.close()
        await client.aclose()


async def _send(context: Context[Any, Any], opened: Opened, event: Event) -> None:
    try:
        await context.write(event_to_pb(event, opened.turn.contract, opened.model.spelled))
    except (
        grpc.aio.InternalError,
        grpc.aio.UsageError,
    ):  # the call ended during the write; that we are cancelled follows in a moment
        raise Cancelled("the client has gone") from None
