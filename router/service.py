"""The Inference service, and how a router starts: loads tokenizers, serves until cancelled."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import grpc.aio

from outrider.config import RouterConfig
from outrider.errors import Cancelled, NotFound, Overloaded
from outrider.rpc.server import serving
from outrider.rpc.status import translated
from outrider.store.client import connect, ping
from outrider.store.registry import Registry
from outrider.store.sessions import Sessions
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from router.answer import Part
from router.background import Background
from router.fleet import Fleet
from router.generation import Cluster, Event, Finished, Generation, Reason, Started
from router.models import ServedModel, load_model
from router.requests import parse

_CLEAN_UP_S = 5.0  # for what ended generations still have to tell others

_REASONS = {
    Reason.STOP: types_pb2.FINISH_REASON_STOP,
    Reason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    Reason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    Reason.DEADLINE: types_pb2.FINISH_REASON_DEADLINE,
}

Context = grpc.aio.ServicerContext


class Inference(InferenceServicer):
    """Translates: requests to generations, their events to messages."""

    def __init__(self, cluster: Cluster, models: Mapping[str, ServedModel]) -> None:
        self._cluster = cluster
        self._models = models
        self.running: dict[str, Generation] = {}

    async def Generate(self, request: pb.GenerateRequest, context: Context[Any, Any]) -> None:
        """One generation, for as long as the call lasts."""
        async with translated(context):
            most = self._cluster.config.max_sessions
            if len(self.running) >= most:
                raise Overloaded(f"this router has {most} sessions, which is its max_sessions; try again soon")
            remaining = context.time_remaining()
            deadline = None if remaining is None else time.time() + remaining
            ask = parse(request, self._models, self._cluster.config)
            generation = Generation(self._cluster, ask, deadline)
            self.running[generation.session_id] = generation
            try:
                await generation.run(partial(_send, context))
            finally:
                del self.running[generation.session_id]

    async def Cancel(self, request: pb.CancelRequest, context: Context[Any, Any]) -> pb.CancelResponse:
        """Ends a generation of this router."""
        async with translated(context):
            generation = self.running.get(request.session_id)
            if generation is not None:
                await generation.cancel()
                return pb.CancelResponse()
            record = await self._cluster.sessions.get(request.session_id)
            if not record.finished and record.lease > time.time():
                raise NotFound(f"session {request.session_id} runs on router {record.owner}; cancel it there")
            return pb.CancelResponse()

    async def ListModels(self, request: pb.ListModelsRequest, context: Context[Any, Any]) -> pb.ListModelsResponse:
        """The models that have a verifier."""
        async with translated(context):
            listed = [await self._describe(model) for model in self._models.values()]
            return pb.ListModelsResponse(models=[model for model in listed if model.verifiers])

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
        )


async def run(config: RouterConfig, redis_url: str, *, announce: Callable[[str], None]) -> None:
    """Serves until cancelled. `announce` hears the bound address once calls are answered.

    On cancellation new calls are refused and running ones have a few seconds to end; then they are cut off.

    Raises CheckpointError for a tokenizer that cannot be loaded, Unavailable when Redis cannot be reached at
    the start, ConfigError for an address that cannot be bound.
    """
    models = {name: await asyncio.to_thread(load_model, name, folder) for name, folder in config.models.items()}
    client = connect(redis_url)
    fleet = Fleet(Registry(client))
    background = Background()
    cluster = Cluster(
        router_id=f"router-{secrets.token_hex(4)}",
        config=config,
        fleet=fleet,
        sessions=Sessions(client, ttl_s=config.session_ttl_s, lease_s=config.lease_s),
        background=background,
    )
    service = Inference(cluster, models)

    def register(server: grpc.aio.Server) -> list[str]:
        add_InferenceServicer_to_server(service, server)
        return [pb.DESCRIPTOR.services_by_name["Inference"].full_name]

    try:
        await ping(client)
        async with serving(config.listen, register) as address:
            announce(address)
            await asyncio.Event().wait()
    finally:
        # The server forgets calls that were cancelled; their handlers may still be on their way out.
        await asyncio.gather(*(generation.ended.wait() for generation in service.running.values()))
        await background.drain(_CLEAN_UP_S)
        await fleet.close()
        await client.aclose()


async def _send(context: Context[Any, Any], event: Event) -> None:
    try:
        await context.write(_event_to_pb(event))
    except grpc.aio.InternalError:  # the call ended during the write; that we are cancelled follows in a moment
        raise Cancelled("the client has gone") from None


def _event_to_pb(event: Event) -> pb.GenerateResponse:
    match event:
        case Started():
            return pb.GenerateResponse(
                started=pb.Started(
                    session_id=event.session_id,
                    model=event.model,
                    seed=event.seed,
                    prompt_tokens=event.prompt_tokens,
                )
            )
        case Part():
            return pb.GenerateResponse(
                chunk=pb.Chunk(
                    text=event.text,
                    token_ids=event.tokens,
                    gaps=event.gaps,
                    next_position=event.position + len(event.tokens),
                    text_offset=event.text_offset,
                )
            )
        case Finished():
            return pb.GenerateResponse(finished=_finished_to_pb(event))


def _finished_to_pb(event: Finished) -> pb.Finished:
    figures = event.figures
    return pb.Finished(
        reason=_REASONS[event.reason],
        usage=pb.Usage(
            prompt_tokens=event.prompt_tokens,
            completion_tokens=figures.completion_tokens,
            steps=figures.steps,
            verified=figures.verified,
            accepted=figures.accepted,
            reached_by_depth=figures.reached_by_depth,
            tried_by_depth=figures.tried_by_depth,
            wire_bytes=figures.wire_bytes,
            first_token_us=figures.first_token_us,
            total_us=figures.elapsed_us(),
            decode_us=figures.last_token_us - figures.first_token_us,
        ),
    )
