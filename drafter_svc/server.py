"""The start of a drafter: loads its model, serves until cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import grpc.aio

from drafter_svc.choice import chosen
from drafter_svc.gate_link import GateLink
from drafter_svc.live_line import LiveLine
from drafter_svc.loading import check_settings, hot_reload, own_tls, with_model, without_model
from drafter_svc.scheduler import DraftScheduler
from drafter_svc.servicer import DrafterServicer
from outrider.config import DrafterConfig
from outrider.engine.tensor_parallel.group import ALONE, Group
from outrider.engine.threads import run_in_short_lived_thread
from outrider.errors import ConfigError
from outrider.rpc.drafter_ids import new_drafter_id
from outrider.rpc.server import serving
from outrider.rpc.supervision import supervising
from outrider.store.redis.client import connect
from outrider.store.redis.redis_clock import RedisClock
from outrider.store.registry import keep_announced
from outrider.store.tickets import listed_keys
from outrider.store.versions import Versions
from outrider.telemetry.metrics import register_metric
from outrider.telemetry.process import exporting_telemetry
from outrider.upstream.ticket_verifier import TicketVerifier
from outrider.wire import drafter

NOWHERE = "redis://127.0.0.1:1"  # the address of no Redis


async def run(config: DrafterConfig, redis_url: str, *, announce: Callable[[str], None], group: Group = ALONE) -> None:
    """Serve until cancelled. `announce` receives the bound address once calls are answered; `redis_url`: empty for a
    drafter that no router finds; `group`: the ranks that share the model, of which this is the first.

    Raises CheckpointError when the model cannot be loaded, ConfigError when the configuration does not fit the model or
    the address cannot be bound, TokenizerMismatch for a store of another tokenizer.
    """
    check_settings(config)
    config = await chosen(config)
    tls = own_tls(config)
    worker_id = new_drafter_id(tls.cert if tls is not None else None)
    if not redis_url and config.learns:
        raise ConfigError("learns: what it learns from is in Redis; give --redis")
    redis, clock = connect(redis_url or NOWHERE), RedisClock()  # it connects when it is used
    register_metric("outrider.clock.skew", clock.skew_s)
    if config.drafts == "model":
        ticket_verifier = TicketVerifier(partial(listed_keys, redis, clock.now), clock.now)
        servicer = await asyncio.to_thread(
            run_in_short_lived_thread, partial(with_model, config, worker_id, ticket_verifier, group)
        )
    else:
        servicer = without_model(config, worker_id)
    scheduler = servicer.scheduler

    def register(server: grpc.aio.Server) -> list[str]:
        name = drafter.register(servicer, server)
        return [name] if servicer.stream_servicer is None else [name, servicer.stream_servicer.register(server)]

    changed = asyncio.Event()  # set when the announced entry changes

    def begin_drain() -> None:
        servicer.begin_drain()
        changed.set()

    servicer.register_metrics()
    with exporting_telemetry("drafter", worker_id, config.metrics):
        if config.connect is not None:
            await _dial(config.connect, config.ca, servicer, announce)
        try:
            async with (
                aclosing(redis),
                supervising() as tasks,
                serving(
                    config.listen,
                    register,
                    drain_s=config.drain_s,
                    begin_drain=begin_drain,
                    tls=servicer.upstreams.tls,
                    probes=config.health,
                ) as address,
            ):
                tasks.run_required("growth", scheduler.run)
                if servicer.stream_servicer is not None:
                    tasks.keep_running("ticket keys", servicer.stream_servicer.read_ticket_keys)
                if config.learns and isinstance(scheduler, DraftScheduler):
                    versions = Versions(redis, config.model_name)
                    tasks.keep_running("learning", hot_reload(config, servicer.capacity, scheduler, versions).run)
                describe = partial(servicer.describe, address)
                if redis_url:
                    tasks.keep_running(
                        "announcement", partial(keep_announced, redis_url, describe, config.heartbeat_s, changed, clock)
                    )
                announce(address)
                await asyncio.Event().wait()  # until cancelled; drafting goes on until the server has drained
        finally:
            await servicer.upstreams.close()


async def _dial(router: str, ca: Path | None, servicer: DrafterServicer, announce: Callable[[str], None]) -> None:
    """Serve a router that this drafter dials, until cancelled. `announce` gets its address once it lists this."""
    link = GateLink(router, ca, servicer, announce)
    try:
        async with supervising() as tasks:
            tasks.run_required("growth", servicer.scheduler.run)
            tasks.keep_running("live line", LiveLine(link, servicer).run)
            await link.run()
    finally:
        servicer.begin_drain()
        await servicer.upstreams.close()
