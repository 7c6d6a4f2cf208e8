"""The Drafter service, and the start of a drafter: loads its model, serves until cancelled."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc.aio
from tokenizers import Tokenizer

from drafter_svc.exclusive_settings import check_settings
from drafter_svc.hot_reload import HotReload, RequiredShape
from drafter_svc.ngram_drafter import NgramScheduler
from drafter_svc.scheduler import DraftScheduler
from drafter_svc.tracing import TracedDrafts
from drafter_svc.translator import Translator
from drafter_svc.upstream import Attachment, Upstream
from drafter_svc.wire_decode import NO_FEATURES, WantedFeatures
from outrider.config import DrafterConfig
from outrider.core.proposers.lookup import Lookups
from outrider.core.tree.delta import Delta
from outrider.draft_server.servicer import DraftStreamServicer
from outrider.draft_server.ticket_verifier import TicketVerifier
from outrider.engine.checkpoints.checkpoint import read_tokenizer_digest
from outrider.engine.checkpoints.model_card import read_card, weights_digest
from outrider.engine.engine import SCRATCH, Engine
from outrider.engine.loading import load_engine, outline, requires_torch
from outrider.engine.ranks.group import ALONE, Group
from outrider.engine.ranks.leader import lead
from outrider.engine.threads import run_in_short_lived_thread
from outrider.errors import ConfigError, InvalidRequest, Moved, Overloaded
from outrider.hub import checkpoint_folder
from outrider.rpc.server import serving
from outrider.rpc.status import errors_as_status
from outrider.rpc.supervision import supervising
from outrider.rpc.tls import Tls
from outrider.rpc.tracing import server_span
from outrider.store.client import connect
from outrider.store.registry import TOP, Worker, keep_announced
from outrider.store.tickets import ticket_key
from outrider.store.versions import Versions
from outrider.telemetry.metrics import register_metric
from outrider.telemetry.process import exporting_telemetry
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.drafter_pb2_grpc import (
    DrafterServicer,
    add_DrafterServicer_to_server,
    add_TreeSinkServicer_to_server,
)

IDLE_S = 60.0  # how long the stream to an upstream stays open with no session on it

Context = grpc.aio.ServicerContext


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a drafter can serve."""

    tokenizer_digest: bytes
    vocabulary: int
    context: int  # tokens of a session
    slots: int  # sessions at once
    parameters: int  # of its model; 0: there is no model
    trained_for: str = ""  # digest of the target that its model's card names; "": any
    features: WantedFeatures = NO_FEATURES  # that its model drafts from


class DraftServicer(DrafterServicer):
    """Serves the routers: attaches sessions, and keeps one stream to each upstream."""

    def __init__(
        self,
        config: DrafterConfig,
        worker_id: str,
        capacity: Capacity,
        stream_servicer: DraftStreamServicer | None = None,
    ) -> None:
        """`stream_servicer`: serves the lower tier."""
        self.stream_servicer = stream_servicer
        self.tls = Tls.read(config.ca, config.cert, config.key)
        self._config = config
        self._worker_id = worker_id
        self._capacity = capacity
        self._refused = 0
        self._draining = False
        self._upstreams: dict[str, Upstream] = {}
        self._closing: set[asyncio.Task[None]] = set()  # idle streams that are being closed
        self._scheduler: AnyScheduler

    def serve(self, scheduler: AnyScheduler) -> None:
        """Has `scheduler` do the drafting. Called once, before the first call."""
        self._scheduler = scheduler

    async def Attach(self, request: pb.AttachRequest, context: Context[Any, Any]) -> pb.AttachResponse:
        """Drafts for a session. Repeating it changes nothing; another upstream or a higher epoch replaces it."""
        async with errors_as_status(context), server_span(context, "outrider.v1.Drafter/Attach") as call:
            if not request.session_id or not request.upstream:
                raise InvalidRequest("session_id", "and upstream must both be given")
            if self._draining:
                raise Moved("this drafter is going down; ask another one")
            upstream, present = self._find(request.session_id)
            if present and upstream and request.epoch < present.epoch:
                return pb.AttachResponse()
            if (
                present
                and upstream
                and request.epoch == present.epoch
                and upstream.address == self._upstream_address(request)
            ):
                present.ticket = request.ticket  # for its next subscription
                return upstream.refusals.attach_response(present.key)
            if present and upstream:
                self._drop(upstream, present)
            if sum(len(upstream.attachments) for upstream in self._upstreams.values()) >= self._capacity.slots:
                raise Overloaded(f"all {self._capacity.slots} slots of this drafter are in use")
            attachment = Attachment(request.session_id, request.tenant, request.epoch, request.ticket)
            if call.span.is_recording():
                attachment.traced = TracedDrafts(call.span, attachment, self._worker_id, self._config.tier)
            upstream = self._upstream_for(self._upstream_address(request))
            upstream.attach(attachment)
            answer = upstream.refusals.attach_response(attachment.key)
            upstream.refusals.forget(attachment.key)
            return answer

    async def Detach(self, request: pb.DetachRequest, context: Context[Any, Any]) -> pb.DetachResponse:
        """Stops drafting for a session."""
        upstream, present = self._find(request.session_id)
        if present and upstream and present.epoch <= request.epoch:
            self._drop(upstream, present)
        return pb.DetachResponse()

    async def Describe(self, request: types_pb2.DescribeRequest, context: Context[Any, Any]) -> pb.DrafterDescription:
        """Describes this drafter: its model, its capacity and its state."""
        return pb.DrafterDescription(
            worker_id=self._worker_id,
            model=self._config.model_name,
            tokenizer_digest=self._capacity.tokenizer_digest,
            vocabulary=self._capacity.vocabulary,
            context=self._capacity.context,
            slots=self._capacity.slots,
            sessions=len(self._scheduler.members),
            levels=self._scheduler.progress.steps,
            nodes=self._scheduler.nodes,
            refused_frames=self._refused,
            tasks=len(asyncio.all_tasks()),
            tier=self._config.tier,
            drafters=self.stream_servicer.streams if self.stream_servicer is not None else 0,
            refusals=[
                f"{one.address}: {why}"
                for one in self._upstreams.values()
                if (why := one.refusals.reason(attached=bool(one.attachments)))
            ],
        )

    def describe(self, address: str) -> Worker:
        """Return the drafter's entry in the registry."""
        return Worker(
            worker_id=self._worker_id,
            role="drafter",
            address=self._config.advertise or address,
            model=self._config.model_name,
            tokenizer_digest=self._capacity.tokenizer_digest,
            vocabulary=self._capacity.vocabulary,
            context=self._capacity.context,
            slots=self._capacity.slots,
            sessions=len(self._scheduler.members),
            parameters=self._capacity.parameters,
            tier=self._config.tier,
            above=TOP if self._config.upstream_tier is None else self._config.upstream_tier,
            serves=self.stream_servicer is not None,
            zone=self._config.zone,
            draining=self._draining,
            trained_for=self._capacity.trained_for,
            draws=self._config.drafts == "model" and self._config.target is None,
        )

    def hot_reload(self, scheduler: DraftScheduler, versions: Versions) -> HotReload:
        """Return the task that keeps the drafter's model up to date."""
        config, capacity = self._config, self._capacity
        required = RequiredShape(
            checkpoint_folder(config.model),
            capacity.tokenizer_digest,
            capacity.vocabulary,
            capacity.context,
            capacity.trained_for,
        )
        return HotReload(
            scheduler, versions, required, lambda folder: load_part(config.model_copy(update={"model": folder}))
        )

    def register_metrics(self) -> None:
        """Registers the drafter's gauges and counters under their catalogue names."""
        scheduler, stream_servicer = self._scheduler, self.stream_servicer
        register_metric("outrider.sessions", lambda: len(scheduler.members))
        register_metric("outrider.draft.passes", lambda: scheduler.progress.steps)
        register_metric("outrider.draft.nodes", lambda: scheduler.nodes)
        if isinstance(scheduler, DraftScheduler):
            register_metric("outrider.kv.preemptions", lambda: scheduler.preempted)
            register_metric(
                "outrider.draft.agreed", lambda: sum(agreed for agreed, _ in scheduler.agreement().values())
            )
            register_metric(
                "outrider.draft.judged", lambda: sum(judged for _, judged in scheduler.agreement().values())
            )
        register_metric("outrider.drafters", lambda: stream_servicer.streams if stream_servicer is not None else 0)
        register_metric(
            "outrider.frames.refused",
            lambda: self._refused + (stream_servicer.refused if stream_servicer is not None else 0),
        )

    def begin_drain(self) -> None:
        """Takes no more sessions, and detaches from all sessions, upstream and in the lower tier."""
        self._draining = True
        for upstream in self._upstreams.values():
            for attachment in [*upstream.attachments.values()]:
                self._drop(upstream, attachment)
        if self.stream_servicer is not None:
            self.stream_servicer.begin_drain()

    async def close(self) -> None:
        """Ends all streams."""
        for upstream in self._upstreams.values():
            await upstream.close()
        await asyncio.gather(*self._closing)

    def _find(self, session_id: str) -> tuple[Upstream | None, Attachment | None]:
        for upstream in self._upstreams.values():
            if attachment := upstream.attachments.get(session_id):
                return upstream, attachment
        return None, None

    def _drop(self, upstream: Upstream, attachment: Attachment) -> None:
        upstream.detach(attachment)
        self._scheduler.closed(attachment)

    def _upstream_address(self, request: pb.AttachRequest) -> str:
        """Return the address to draft at for this request."""
        return self._config.via or request.upstream

    def _upstream_for(self, address: str) -> Upstream:
        """Return the stream to an upstream, or to the tunnel that leads there. Ends other streams that were idle for
        long. Does not await: nothing may change between a look at the attachments and a new attachment.
        """
        others = [upstream for upstream in self._upstreams.values() if upstream.address != address]
        for idle in [upstream for upstream in others if upstream.idle_s > IDLE_S]:
            del self._upstreams[idle.address]
            closing = asyncio.create_task(idle.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        if address not in self._upstreams:
            hello = pb.Hello(
                drafter_id=self._worker_id,
                tokenizer_digest=self._capacity.tokenizer_digest,
                vocabulary=self._capacity.vocabulary,
            )
            self._upstreams[address] = Upstream(
                address,
                hello,
                self._capacity.vocabulary,
                self._scheduler,
                self._count_refusal,
                self.tls,
                self._capacity.features,
            )
        return self._upstreams[address]

    def send(self, attachment: Attachment, delta: Delta, plan_version: int, exhausted: bool) -> None:
        """Sends new nodes of a session to its upstream."""
        upstream, _ = self._find(attachment.session_id)
        if upstream:
            upstream.send(attachment, delta, plan_version, exhausted)

    def resync(self, attachment: Attachment) -> None:
        """Requests a snapshot for a session whose mirror drifted."""
        upstream, _ = self._find(attachment.session_id)
        if upstream:
            self._refused += 1
            upstream.resubscribe(
                attachment, "this drafter's copy of the session differed from the upstream's too often"
            )

    def _count_refusal(self) -> None:
        self._refused += 1


def load_part(config: DrafterConfig, group: Group = ALONE) -> Engine:
    """Return a rank's part of the draft model.

    Raises CheckpointError, and ConfigError for what this checkpoint or machine does not have.
    """
    if config.kv_memory is not None and config.heads is not None:
        raise ConfigError("kv_memory: does not work with heads, whose memory has no bound; leave it out, or heads")
    if config.heads is not None:
        with requires_torch("heads"):
            from outrider.engine.heads.eagle_engine import EagleEngine
        return EagleEngine.load(
            checkpoint_folder(config.heads),
            checkpoint_folder(config.model),
            precise=config.dtype == "float32",
            slots=config.slots,
            threads=config.threads,
        )
    engine = load_engine(
        checkpoint_folder(config.model),
        rows=None if config.context is None else config.context + SCRATCH,
        backend=config.backend,
        dtype=config.dtype,
        device=config.device,
        layers=config.layers,
        skip=config.skip,
        slots=config.slots,
        threads=config.threads,
        numerics=config.numerics,
        group=group,
        kv_memory=config.kv_memory,
    )
    if config.context is not None:
        engine.context = min(engine.context, config.context)  # there are no KV rows for more
    if engine.treeless:
        raise ConfigError(f"model: {config.model} cannot draft, for it cannot grow a tree: {engine.treeless}")
    return engine


def _wanted_features(config: DrafterConfig, engine: Engine) -> WantedFeatures:
    """Return the features that the drafter's heads draft from."""
    if config.heads is None:
        return NO_FEATURES
    from outrider.engine.heads.fusing import fusion_digest

    return WantedFeatures(fusion_digest(checkpoint_folder(config.heads)), engine.fed_width)


AnyScheduler = DraftScheduler | NgramScheduler | Translator


def with_model(
    config: DrafterConfig, worker_id: str, ticket_verifier: TicketVerifier, group: Group = ALONE
) -> tuple[DraftServicer, DraftScheduler | Translator]:
    """Return a drafter that has a model, and its scheduler. `ticket_verifier`: check the tickets of a lower tier."""
    engine = lead(load_part(config, group), group)
    capacity = Capacity(
        engine.tokenizer_digest,
        engine.vocabulary,
        engine.context,
        config.slots,
        engine.parameters,
        _trained_for(config),
        _wanted_features(config, engine),
    )
    if config.target is None:
        stream_servicer = (
            DraftStreamServicer(worker_id, capacity.tokenizer_digest, ticket_verifier) if config.serves else None
        )
        servicer = DraftServicer(config, worker_id, capacity, stream_servicer)
        scheduler = _draft_scheduler(config, engine, servicer.send, servicer.resync, stream_servicer)
        servicer.serve(scheduler)
        if stream_servicer is not None:
            stream_servicer.serve(scheduler)
        return servicer, scheduler
    folders = [checkpoint_folder(checkpoint, weights=False) for checkpoint in (config.target, config.model)]
    digest, vocabulary = read_tokenizer_digest(folders[0]), outline(folders[0]).vocabulary
    servicer = DraftServicer(config, worker_id, replace(capacity, tokenizer_digest=digest, vocabulary=vocabulary))
    tokenizers = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in folders)
    translator = Translator(*tokenizers, send=servicer.send, resync=servicer.resync)
    translator.serve(_draft_scheduler(config, engine, translator.on_delta, translator.reopen))
    servicer.serve(translator)
    return servicer, translator


def _trained_for(config: DrafterConfig) -> str:
    """Return the digest of the only target that the model drafts for; "": it drafts for any. Raises CheckpointError."""
    folder = checkpoint_folder(config.model)
    if config.heads is not None:
        return weights_digest(folder)
    card = None if config.any_target else read_card(folder)
    return card.target_digest if card else ""


def _draft_scheduler(
    config: DrafterConfig,
    engine: Engine,
    send: Callable[[Attachment, Delta, int, bool], None],
    resync: Callable[[Attachment], None],
    stream_servicer: DraftStreamServicer | None = None,
) -> DraftScheduler:
    return DraftScheduler(
        engine,
        level_nodes=config.level_nodes,
        prefill_chunk=config.prefill_chunk,
        send=send,
        resync=resync,
        tree=config.tree,
        lower_tier=stream_servicer,
    )


def without_model(config: DrafterConfig, worker_id: str) -> tuple[DraftServicer, NgramScheduler]:
    """Return a drafter without a model, and its scheduler. Reads only the tokenizer and the configuration."""
    assert config.drafts != "model"
    folder = checkpoint_folder(config.model, weights=False)
    model = outline(folder, config.backend)
    digest = read_tokenizer_digest(folder)
    lookups = Lookups.open(config.drafts, config.store, digest)
    servicer = DraftServicer(config, worker_id, Capacity(digest, model.vocabulary, model.context, config.slots, 0))
    scheduler = NgramScheduler(lookups, slots=config.slots, send=servicer.send, resync=servicer.resync)
    servicer.serve(scheduler)
    return servicer, scheduler


async def run(config: DrafterConfig, redis_url: str, *, announce: Callable[[str], None], group: Group = ALONE) -> None:
    """Serves until cancelled. `announce` receives the bound address once calls are answered; `group`: the ranks that
    share the model, of which this is the first.

    Raises CheckpointError when the model cannot be loaded, ConfigError when the configuration does not fit the model or
    the address cannot be bound, TokenizerMismatch for a store of another tokenizer.
    """
    check_settings(config)
    worker_id = f"drafter-{secrets.token_hex(4)}"
    servicer: DraftServicer
    scheduler: AnyScheduler
    redis = connect(redis_url)
    if config.drafts == "model":
        ticket_verifier = TicketVerifier(await ticket_key(redis), partial(ticket_key, redis))
        servicer, scheduler = await asyncio.to_thread(
            run_in_short_lived_thread, partial(with_model, config, worker_id, ticket_verifier, group)
        )
    else:
        servicer, scheduler = without_model(config, worker_id)

    def register(server: grpc.aio.Server) -> list[str]:
        add_DrafterServicer_to_server(servicer, server)
        services = ["Drafter"]
        if servicer.stream_servicer is not None:
            add_TreeSinkServicer_to_server(servicer.stream_servicer, server)
            services.append("TreeSink")
        return [pb.DESCRIPTOR.services_by_name[name].full_name for name in services]

    changed = asyncio.Event()  # set when the announced entry changes

    def begin_drain() -> None:
        servicer.begin_drain()
        changed.set()

    servicer.register_metrics()
    with exporting_telemetry("drafter", worker_id, config.metrics):
        try:
            async with (
                aclosing(redis),
                supervising() as tasks,
                serving(
                    config.listen,
                    register,
                    drain_s=config.drain_s,
                    begin_drain=begin_drain,
                    tls=servicer.tls,
                    probes=config.health,
                ) as address,
            ):
                tasks.run_required("growth", scheduler.run)
                if config.learns and isinstance(scheduler, DraftScheduler):
                    tasks.keep_running(
                        "learning", servicer.hot_reload(scheduler, Versions(redis, config.model_name)).run
                    )
                describe = partial(servicer.describe, address)
                tasks.keep_running(
                    "announcement", partial(keep_announced, redis_url, describe, config.heartbeat_s, changed)
                )
                announce(address)
                await asyncio.Event().wait()  # until cancelled; drafting goes on until the server has drained
        finally:
            await servicer.close()
