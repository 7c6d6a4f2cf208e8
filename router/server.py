"""The start of a router: loads tokenizers, serves until cancelled."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial

import grpc.aio

from outrider.config import RouterConfig
from outrider.core.control.drafters.tier_selection import TierSwitch
from outrider.rpc.server import ServerLimits, serving
from outrider.rpc.supervision import supervising
from outrider.rpc.tls import Tls, is_loopback
from outrider.store.acceptance_priors import share
from outrider.store.adapters import NamedAdapters
from outrider.store.api_keys import Keys, TextReaders
from outrider.store.kept_responses import KeptResponses
from outrider.store.redis.client import connect
from outrider.store.redis.redis_clock import RedisClock
from outrider.store.registry import Registry
from outrider.store.session_events import SessionEvents
from outrider.store.sessions import Sessions
from outrider.store.tenant_storage import TenantStorage
from outrider.store.tickets import list_key
from outrider.telemetry.metrics import register_metric
from outrider.telemetry.process import exporting_telemetry
from outrider.wire import inference
from outrider.wire.tickets import TicketSigner
from router.api.auth import ApiKeyAuthenticator, Authenticator, JudgedByKey
from router.api.draft_relay import DraftRelay
from router.api.gate_servicer import GateServicer
from router.api.servicer import GenerateServicer
from router.background import BackgroundTasks
from router.counters.request_metrics import RouterMetrics, mean
from router.drafters.warm_start import WarmStart
from router.reporting.dashboard import pages, sums
from router.reporting.recent_sums import RecentSums
from router.reporting.tree_view import TreeView
from router.requests.served_models import ServedModel, load_model
from router.scheduling.adapters import AdapterDirectory
from router.scheduling.admission import Admission
from router.scheduling.gate import Gate
from router.scheduling.workers import WorkerPool
from router.sessions.context import DecodeResources, RouterContext, SessionStore
from router.sessions.generation import OwnedGeneration
from router.sessions.maintenance import keep_key_listed, keep_measured, refresh_workers, sweep
from router.sessions.sample_writer import SampleWriter
from router.sessions.verifier_link import VerifierLinks

REQUEST_MARGIN = 2**16  # bytes by which a message may be longer than `max_request_bytes`, to be refused by that name
_CLEAN_UP_S = 5.0  # how long ended generations have for their last messages

log = logging.getLogger(__name__)


async def run(config: RouterConfig, redis_url: str, *, announce: Callable[[str], None]) -> None:
    """Serve until cancelled. `announce` gets the bound address once calls are answered.

    On cancellation new calls are refused and running ones end as Moved; calls that have not ended within `drain_s` are
    cut off.

    Raises CheckpointError for a tokenizer or chat template that cannot be loaded, Unavailable when Redis cannot be
    reached at the start, ConfigError for an address that cannot be bound.
    """
    models: dict[str, ServedModel] = {}
    try:
        for name, checkpoint in config.models.items():
            tool_format = config.tool_formats.get(name, "")
            models[name] = await asyncio.to_thread(load_model, name, checkpoint, config.template_s, tool_format)
        await _serve(config, models, redis_url, announce)
    finally:
        for model in models.values():
            await asyncio.to_thread(model.close)


async def _serve(
    config: RouterConfig, models: Mapping[str, ServedModel], redis_url: str, announce: Callable[[str], None]
) -> None:
    client, clock = connect(redis_url), RedisClock()
    tls = Tls.read(config.ca, config.cert, config.key)
    if config.auth == "keys" and tls is None and not is_loopback(config.listen.rpartition(":")[0]):
        log.warning(
            "API keys cross the network in the clear on %s: give this router a certificate (ca, cert and key), or "
            "listen on 127.0.0.1 behind something that speaks TLS",
            config.listen,
        )
    worker_pool = WorkerPool(Registry(client), config.zone, tls, Gate(TextReaders(client)))
    background = BackgroundTasks()
    admission = Admission(config, worker_pool.capacity)
    storage = TenantStorage(
        client, config.session_ttl_s, sessions=config.tenant_stored_sessions, size=config.tenant_stored_bytes
    )
    router = RouterContext(
        models=models,
        adapters=AdapterDirectory(
            models, NamedAdapters(client), worker_pool, config.adapter_loaders, config.adapter_publishers
        ),
        admission=admission,
        store=SessionStore(
            router_id=f"router-{secrets.token_hex(4)}",
            sessions=Sessions(
                client, ttl_s=config.session_ttl_s, lease_s=config.lease_s, resume_ttl_s=config.resume_ttl_s
            ),
            events=SessionEvents(client),
            storage=storage,
            responses=KeptResponses(client, config.session_ttl_s, storage),
            clock=clock,
        ),
        decoding=DecodeResources(
            config=config,
            worker_pool=worker_pool,
            verifier_links=VerifierLinks(worker_pool.channels.to, config.lease_s),
            tiers=TierSwitch(measured=config.tiers == "measured"),
            ticket_signer=TicketSigner(clock.now),
            sample_writer=SampleWriter(client, config.teaches),
            metrics=RouterMetrics(),
            background=background,
        ),
        warm_start=WarmStart(partial(share, client), worker_pool.drafter_models),
    )
    service = GenerateServicer(router)
    authenticator = ApiKeyAuthenticator(Keys(client, clock)) if config.auth == "keys" else Authenticator()

    register_metric("outrider.requests.running", lambda: len(service.calls.running))
    register_metric("outrider.queue.depth", admission.depths)
    register_metric("outrider.gamma", lambda: mean([one.plan.depth for one in tuple(service.calls.running.values())]))
    register_metric("outrider.workers", worker_pool.counts)
    register_metric("outrider.clock.skew", clock.skew_s)

    def register(server: grpc.aio.Server) -> list[str]:
        gate = GateServicer(worker_pool, Registry(client), router.store.router_id, authenticator)
        relay = DraftRelay(worker_pool)
        return [inference.register(service, server), gate.register(server), relay.register(server)]

    try:
        public_key = router.decoding.ticket_signer.public_key
        await clock.read(client)
        await list_key(client, public_key, clock.now())  # before the first ticket, for drafts from the first session on

        def running() -> tuple[OwnedGeneration, ...]:
            return tuple(service.calls.running.values())

        trees, history = TreeView(service.steps.steps, running), RecentSums(lambda: sums(router, running()))
        shown = pages(router, running, trees, history)
        with exporting_telemetry("router", router.store.router_id, config.metrics, shown):
            async with (
                supervising() as tasks,
                serving(
                    config.listen,
                    register,
                    drain_s=config.drain_s,
                    begin_drain=service.calls.begin_drain,
                    drained=service.calls.drained,
                    tls=tls,
                    mutual=False,
                    judge=JudgedByKey(authenticator, admission.rates),
                    limits=ServerLimits(
                        message_bytes=config.max_request_bytes + REQUEST_MARGIN,
                        calls=config.calls,
                        connections=config.max_connections,
                        share_port=config.share_port,
                    ),
                    probes=config.health,
                ) as address,
            ):
                tasks.keep_running("fleet", partial(refresh_workers, worker_pool, admission))
                tasks.keep_running("ticket key", partial(keep_key_listed, client, public_key, clock))
                tasks.keep_running("storage", partial(keep_measured, router.store.storage))
                tasks.keep_running("sweep", partial(sweep, router.store.sessions))
                tasks.keep_running("warm start", router.warm_start.run)
                tasks.keep_running("session events", service.steps.run)
                tasks.keep_running("tree view", trees.run)
                if config.metrics is not None:
                    tasks.keep_running("history", history.run)
                tasks.keep_running("training samples", router.decoding.sample_writer.run)
                announce(address)
                await asyncio.Event().wait()
    finally:
        # The server forgets cancelled calls; their handlers may still be ending.
        await asyncio.gather(*(generation.ended.wait() for generation in service.calls.running.values()))
        await background.drain(_CLEAN_UP_S)
        await router.decoding.verifier_links.close()
        await worker_pool.channels.close()
        await client.aclose()
