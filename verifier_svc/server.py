"""Starts a verifier: loads the target, measures its cost, serves until cancelled."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import grpc.aio

from outrider.config import VerifierConfig
from outrider.core.control.arms.arm import Arm
from outrider.core.control.cost.budget import CostModel
from outrider.core.proposers.lookup import Lookups
from outrider.core.session.prefix_keys import pack_keys
from outrider.core.session.speculation_status import printable
from outrider.engine.checkpoints.model_card import weights_digest
from outrider.engine.interface.engine import SCRATCH, Engine
from outrider.engine.interface.features import Features
from outrider.engine.loading import load_engine, requires_torch
from outrider.engine.tensor_parallel.group import ALONE, Group
from outrider.engine.tensor_parallel.leader import lead
from outrider.engine.threads import run_in_short_lived_thread
from outrider.errors import CheckpointError, ConfigError
from outrider.hub import checkpoint_folder
from outrider.rpc.drafter_ids import UNNAMED
from outrider.rpc.server import serving
from outrider.rpc.supervision import supervising
from outrider.rpc.tls import Tls
from outrider.store.redis.client import connect
from outrider.store.redis.redis_clock import RedisClock
from outrider.store.registry import Worker, keep_announced
from outrider.store.tickets import listed_keys
from outrider.telemetry.metrics import register_metric
from outrider.telemetry.pages import json_page
from outrider.telemetry.process import exporting_telemetry
from outrider.upstream.servicer import UpstreamServicer
from outrider.upstream.ticket_verifier import TicketVerifier
from outrider.wire import verifier
from verifier_svc.feature_store import FeatureFuser, HeadFeatureFuser
from verifier_svc.proposers.head_proposer import HeadProposer, SpeculatorProposer
from verifier_svc.proposers.ngram_proposer import NgramProposers
from verifier_svc.scheduler import StepScheduler
from verifier_svc.servicer import VerifierServicer

SWEEP = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # rows of the passes whose cost is measured at start

SWEEP_S = 1.0  # for all of them; a slow model has the smaller ones alone (8B on two cores: all would take 45 s)

log = logging.getLogger(__name__)


async def run(config: VerifierConfig, redis_url: str, *, announce: Callable[[str], None], group: Group = ALONE) -> None:
    """Serve until cancelled. `announce` receives the bound address once calls are answered; `group`: the ranks that
    share the model, of which this is the first.

    Raises CheckpointError when the model cannot be loaded, ConfigError when the address cannot be bound, or a
    certificate or the store is invalid, TokenizerMismatch for a store of another tokenizer.
    """
    worker_id = f"verifier-{secrets.token_hex(4)}"
    tls = Tls.read(config.ca, config.cert, config.key)
    if tls is None and config.trusted_drafters != (UNNAMED,):
        raise ConfigError(
            "trusted_drafters: needs certificates (ca, cert and key); without them anybody may draft under any name"
        )
    engine, cost = await asyncio.to_thread(run_in_short_lived_thread, partial(load, config, group))
    head_proposer = await asyncio.to_thread(run_in_short_lived_thread, partial(make_head_proposer, config, engine))
    feature_fuser = await asyncio.to_thread(run_in_short_lived_thread, partial(make_feature_fuser, config, engine))
    weights = await asyncio.to_thread(_weights, config)
    redis, clock = connect(redis_url), RedisClock()
    register_metric("outrider.clock.skew", clock.skew_s)
    ticket_verifier = TicketVerifier(partial(listed_keys, redis, clock.now), clock.now)
    stream_servicer = UpstreamServicer(
        worker_id, engine.tokenizer_digest, ticket_verifier, feature_fuser.digest, config.trusted_drafters
    )
    scheduler = StepScheduler(
        engine,
        cost,
        prefill_chunk=config.prefill_chunk,
        max_nodes=config.max_nodes,
        publish=stream_servicer.sender.publish,
        pause=stream_servicer.sender.pause,
        ngram_proposers=make_ngram_proposers(config, engine),
        head_proposer=head_proposer,
        feature_fuser=feature_fuser,
        pinned=None if config.arm == "measured" else Arm.parse(config.arm),
    )
    stream_servicer.serve(scheduler)
    decode_servicer = VerifierServicer(config, worker_id, engine, scheduler, stream_servicer)

    def register(server: grpc.aio.Server) -> list[str]:
        return [verifier.register(decode_servicer, server), stream_servicer.register(server)]

    changed = asyncio.Event()  # set when the announced entry changes

    def begin_drain() -> None:
        scheduler.sessions.begin_drain(stream_servicer.begin_drain)
        changed.set()

    _register_metrics(engine, scheduler, stream_servicer)
    with exporting_telemetry("verifier", worker_id, config.metrics, {"/control": json_page(scheduler.estimates)}):
        async with (
            aclosing(redis),
            supervising() as tasks,
            serving(
                config.listen, register, drain_s=config.drain_s, begin_drain=begin_drain, tls=tls, probes=config.health
            ) as address,
        ):

            def describe() -> Worker:
                steering = scheduler.learning.steering
                plain, plain_error = steering.plain()
                return Worker(
                    worker_id=worker_id,
                    role="verifier",
                    address=config.advertise or address,
                    model=config.model_name,
                    tokenizer_digest=engine.tokenizer_digest,
                    vocabulary=engine.vocabulary,
                    context=engine.context,
                    slots=engine.slots,
                    sessions=len(scheduler.sessions),
                    parameters=engine.parameters,
                    treeless=bool(engine.treeless),
                    treeless_why=printable(engine.treeless),
                    zone=config.zone,
                    draining=scheduler.sessions.draining,
                    prefill=config.prefill_chunk / cost.seconds(config.prefill_chunk),
                    pass_s=cost.seconds(1),
                    weights=weights,
                    dtype=engine.types,
                    arm=str(steering.governor.arm),
                    arm_reason=steering.governor.reason,
                    tokens_per_s=steering.tokens_per_s,
                    plain_tokens_per_s=plain,
                    plain_error=plain_error,
                    prefixes=pack_keys(scheduler.sessions.slots.keys()),
                    trusts="*" if tls is None else " ".join(config.trusted_drafters),
                )

            tasks.run_required("step loop", scheduler.run)
            tasks.keep_running("ticket keys", stream_servicer.read_ticket_keys)
            tasks.keep_running(
                "announcement", partial(keep_announced, redis_url, describe, config.heartbeat_s, changed, clock)
            )
            announce(address)
            await asyncio.Event().wait()  # until cancelled; steps go on until the server has drained


def _register_metrics(engine: Engine, scheduler: StepScheduler, stream_servicer: UpstreamServicer) -> None:
    """Register the verifier's gauges and counters under their catalogue names."""
    register_metric("outrider.slots", lambda: engine.slots)
    register_metric("outrider.sessions", lambda: len(scheduler.sessions))
    register_metric("outrider.kv.tokens", lambda: sum(session.cached for session in tuple(scheduler.sessions.values())))
    register_metric("outrider.kv.capacity", lambda: engine.kv_tokens or engine.slots * engine.context)
    register_metric("outrider.kv.preemptions", lambda: scheduler.choice.memory.preempted)
    register_metric("outrider.drafters", lambda: stream_servicer.streams)
    register_metric("outrider.frames.refused", lambda: stream_servicer.refused)


def make_ngram_proposers(config: VerifierConfig, engine: Engine) -> NgramProposers:
    """Return the verifier's own n-gram proposers. Raises as a store does, ConfigError and TokenizerMismatch."""
    if engine.treeless:
        return NgramProposers()
    if config.lookup == "lookahead":
        return NgramProposers(ahead=True)
    lookups = config.lookup and Lookups.open(config.lookup, config.store, engine.tokenizer_digest)
    return NgramProposers(lookups, public=config.store is None or config.store_public)


def make_head_proposer(config: VerifierConfig, engine: Engine) -> HeadProposer:
    """Return the proposer of the heads on the target. Raises CheckpointError, and ConfigError for heads of another
    target.
    """
    if config.heads is None or engine.features is None:
        return HeadProposer()
    with requires_torch("heads"):
        from outrider.engine.heads.loading import load_speculator
    speculator = engine.speculator or load_speculator(
        checkpoint_folder(config.heads),
        checkpoint_folder(config.model),
        precise=config.dtype == "float32",
        slots=engine.slots,
        context=engine.context,
    )
    return SpeculatorProposer(speculator, engine.hidden, every=engine.features.all_rows)


def make_feature_fuser(config: VerifierConfig, engine: Engine) -> FeatureFuser:
    """Return the fuser of features for drafters that request them. Raises as `make_head_proposer`."""
    if config.features is None or engine.features is None:
        return FeatureFuser()
    with requires_torch("features"):
        from outrider.engine.heads.fusing import load_fusion
    folders = checkpoint_folder(config.features), checkpoint_folder(config.model)
    fusion = load_fusion(*folders, precise=config.dtype == "float32", device=config.device)
    return HeadFeatureFuser(fusion, engine.hidden, slots=engine.slots, rows=engine.rows)


def _wanted_features(config: VerifierConfig, target: Path) -> Features | None:
    """Return the features that passes give beside logits. Raises as `make_head_proposer`."""
    if config.heads is None and config.features is None:
        return None
    with requires_torch("heads, features"):
        from outrider.engine.heads.fusing import check_eagle
        from outrider.engine.heads.loading import check_heads
    shape = check_heads(checkpoint_folder(config.heads), target) if config.heads else None
    if shape is not None and config.device != "cpu" and not shape.eagle:
        raise ConfigError(f"heads: {shape.kind} heads draft on a CPU alone, not on {config.device}; take EAGLE heads")
    drafting = shape.features if shape else None
    fused = check_eagle(checkpoint_folder(config.features), target).features if config.features else None
    if drafting and fused and drafting != fused:
        raise ConfigError(
            f"features: {config.features} takes other hidden states than heads, {config.heads}, which draft from the "
            "same passes; give both the same folder"
        )
    return drafting or fused


def _weights(config: VerifierConfig) -> str:
    """Return the digest of the model's weights, for drafters that were trained for one target."""
    try:
        return weights_digest(checkpoint_folder(config.model))
    except CheckpointError as error:  # transformers may still load the model from other files
        log.info("%s; it takes drafters that were trained for other models, too", error)
        return ""


def load(config: VerifierConfig, group: Group = ALONE) -> tuple[Engine, CostModel]:
    """Return the target, and what its passes cost here. Log if the target can only be served without speculation."""
    engine = lead(load_part(config, group), group)
    if engine.treeless:
        log.warning("%s is served without speculation: %s", config.model, engine.treeless)
    sweep = [rows for rows in SWEEP if rows <= max(2, config.max_nodes)]
    return engine, CostModel(engine.measure_costs(sweep, within_s=SWEEP_S))


def load_part(config: VerifierConfig, group: Group = ALONE) -> Engine:
    """Return a rank's part of the target. Raises CheckpointError, and ConfigError for what this machine lacks."""
    rows = None if config.context is None else config.context + SCRATCH
    folder = checkpoint_folder(config.model)
    beside = config.heads if config.device != "cpu" and group.shard.rank == 0 else None
    engine = load_engine(
        folder,
        backend=config.backend,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        device=config.device,
        slots=config.slots,
        rows=rows,
        threads=config.threads,
        numerics=config.numerics,
        group=group,
        features=_wanted_features(config, folder),
        kv_memory=config.kv_memory,
        adapters=config.max_adapters if config.adapters else 0,
        heads=None if beside is None else checkpoint_folder(beside),
    )
    if config.context is not None:
        engine.context = min(engine.context, config.context)  # there are no KV rows for more
    return engine
