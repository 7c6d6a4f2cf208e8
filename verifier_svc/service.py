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
from outrider.core.budget import CostModel
from outrider.core.lookup import Lookups
from outrider.core.prefixes import packed
from outrider.core.speculation import shown
from outrider.engine.card import weights_digest
from outrider.engine.engine import SCRATCH, Engine
from outrider.engine.features import Features
from outrider.engine.group import ALONE, Group
from outrider.engine.loading import load_engine, needing_torch
from outrider.engine.ranks import lead
from outrider.engine.threads import briefly
from outrider.errors import CheckpointError, ConfigError
from outrider.hub import checkpoint_folder
from outrider.rpc.server import serving
from outrider.rpc.supervision import supervising
from outrider.rpc.tls import Tls
from outrider.sink.keyring import Keyring
from outrider.sink.sink import Sink
from outrider.store.client import connect
from outrider.store.registry import Worker, keep_announced
from outrider.store.tickets import ticket_key
from outrider.telemetry.metrics import watch
from outrider.telemetry.process import telling
from outrider.v1 import drafter_pb2, verifier_pb2
from outrider.v1.drafter_pb2_grpc import add_TreeSinkServicer_to_server
from outrider.v1.verifier_pb2_grpc import add_VerifierServicer_to_server
from verifier_svc.decode import Decoder
from verifier_svc.fused import Fusing, HeadFusing, NoFusing
from verifier_svc.levels import Drafting, HeadDrafting, NoHeads
from verifier_svc.loop import StepLoop
from verifier_svc.own import OwnDrafting

SWEEP = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # tokens in a pass whose cost is measured at start

log = logging.getLogger(__name__)


async def run(config: VerifierConfig, redis_url: str, *, announce: Callable[[str], None], group: Group = ALONE) -> None:
    """Serves until cancelled. `announce` hears the bound address once calls are answered; `group`: the ranks that share
    the model, of which this is the first.

    Raises CheckpointError when the model cannot be loaded, ConfigError when the address cannot be bound, a certificate
    or the store is none, TokenizerMismatch for a store of another tokenizer.
    """
    worker_id = f"verifier-{secrets.token_hex(4)}"
    tls = Tls.read(config.ca, config.cert, config.key)
    engine, cost = await asyncio.to_thread(briefly, partial(load, config, group))
    heads = await asyncio.to_thread(briefly, partial(head_drafting, config, engine))
    fusing = await asyncio.to_thread(briefly, partial(feature_fusing, config, engine))
    weights = await asyncio.to_thread(_weights, config)
    redis = connect(redis_url)
    keys = Keyring(await ticket_key(redis), partial(ticket_key, redis))
    sink = Sink(worker_id, engine.tokenizer_digest, keys, fusing.digest)
    loop = StepLoop(
        engine,
        cost,
        prefill_chunk=config.prefill_chunk,
        max_nodes=config.max_nodes,
        publish=sink.publish,
        pause=sink.pause,
        own=own_drafting(config, engine),
        heads=heads,
        fusing=fusing,
    )
    sink.serve(loop)
    decoder = Decoder(config, worker_id, engine, loop, sink)

    def register(server: grpc.aio.Server) -> list[str]:
        add_VerifierServicer_to_server(decoder, server)
        add_TreeSinkServicer_to_server(sink, server)
        return [
            verifier_pb2.DESCRIPTOR.services_by_name["Verifier"].full_name,
            drafter_pb2.DESCRIPTOR.services_by_name["TreeSink"].full_name,
        ]

    changed = asyncio.Event()  # what it announces

    def leave() -> None:
        loop.leave(sink.leave)
        changed.set()

    _tell(engine, loop, sink)
    with telling("verifier", worker_id, config.metrics):
        async with (
            aclosing(redis),
            supervising() as tasks,
            serving(
                config.listen, register, drain_s=config.drain_s, leave=leave, tls=tls, probes=config.health
            ) as address,
        ):

            def describe() -> Worker:
                return Worker(
                    worker_id=worker_id,
                    role="verifier",
                    address=config.advertise or address,
                    model=config.model_name,
                    tokenizer_digest=engine.tokenizer_digest,
                    vocabulary=engine.vocabulary,
                    context=engine.context,
                    slots=engine.slots,
                    sessions=len(loop.sessions),
                    parameters=engine.parameters,
                    treeless=bool(engine.treeless),
                    treeless_why=shown(engine.treeless),
                    zone=config.zone,
                    draining=loop.leaving,
                    prefill=config.prefill_chunk / cost.seconds(config.prefill_chunk),
                    weights=weights,
                    prefixes=packed(loop.slots.keys()),
                )

            tasks.need("step loop", loop.run)
            tasks.keep("announcement", partial(keep_announced, redis_url, describe, config.heartbeat_s, changed))
            announce(address)
            await asyncio.Event().wait()  # until cancelled; the loop goes on until the server has drained


def _tell(engine: Engine, loop: StepLoop, sink: Sink) -> None:
    """What may be asked of it at any time, by the names of the catalogue."""
    watch("outrider.slots", lambda: engine.slots)
    watch("outrider.sessions", lambda: len(loop.sessions))
    watch("outrider.kv.tokens", lambda: sum(session.cached for session in tuple(loop.sessions.values())))
    watch("outrider.kv.capacity", lambda: engine.kv_tokens or engine.slots * engine.context)
    watch("outrider.kv.preemptions", lambda: loop.preempted)
    watch("outrider.drafters", lambda: sink.streams)
    watch("outrider.frames.refused", lambda: sink.refused)


def own_drafting(config: VerifierConfig, engine: Engine) -> OwnDrafting:
    """What the verifier is to draft by itself. Raises as a store does, ConfigError and TokenizerMismatch."""
    if engine.treeless:
        return OwnDrafting()
    if config.lookup == "lookahead":
        return OwnDrafting(ahead=True)
    return OwnDrafting(config.lookup and Lookups.open(config.lookup, config.store, engine.tokenizer_digest))


def head_drafting(config: VerifierConfig, engine: Engine) -> Drafting:
    """What heads on the target are to draft. Raises CheckpointError, and ConfigError for heads of another target."""
    if config.heads is None or engine.features is None:
        return NoHeads()
    with needing_torch("heads"):
        from outrider.engine.heads.loading import load_speculator
    speculator = load_speculator(
        checkpoint_folder(config.heads),
        checkpoint_folder(config.model),
        precise=config.dtype == "float32",
        slots=engine.slots,
        context=engine.context,
    )
    return HeadDrafting(speculator, engine.hidden, every=engine.features.every)


def feature_fusing(config: VerifierConfig, engine: Engine) -> Fusing:
    """What is fused for drafters that ask for it. Raises as `head_drafting`."""
    if config.features is None or engine.features is None:
        return NoFusing()
    with needing_torch("features"):
        from outrider.engine.heads.fusing import load_fusion
    folders = checkpoint_folder(config.features), checkpoint_folder(config.model)
    fusion = load_fusion(*folders, precise=config.dtype == "float32")
    return HeadFusing(fusion, engine.hidden, slots=engine.slots, rows=engine.rows)


def _wanted_features(config: VerifierConfig, target: Path) -> Features | None:
    """What passes are to give beside logits. Raises as `head_drafting`."""
    if config.heads is None and config.features is None:
        return None
    with needing_torch("heads, features"):
        from outrider.engine.heads.fusing import check_eagle
        from outrider.engine.heads.loading import check_heads
    drafting = check_heads(checkpoint_folder(config.heads), target).features if config.heads else None
    fused = check_eagle(checkpoint_folder(config.features), target).features if config.features else None
    if drafting and fused and drafting != fused:
        raise ConfigError(
            f"features: {config.features} takes other hidden states than heads, {config.heads}, which draft from the "
            "same passes; give both the same folder"
        )
    return drafting or fused


def _weights(config: VerifierConfig) -> str:
    """The digest of its model, for drafters that were trained for one."""
    try:
        return weights_digest(checkpoint_folder(config.model))
    except CheckpointError as error:  # it is served nevertheless: through transformers, which takes other files, too
        log.info("%s; it takes drafters that were trained for other models, too", error)
        return ""


def load(config: VerifierConfig, group: Group = ALONE) -> tuple[Engine, CostModel]:
    """The target, and what its passes cost here. Says once if it can only be served without speculation."""
    engine = lead(load_part(config, group), group)
    if engine.treeless:
        log.warning("%s is served without speculation: %s", config.model, engine.treeless)
    sweep = [tokens for tokens in SWEEP if tokens <= max(2, config.max_nodes)]
    return engine, CostModel(engine.measure_costs(sweep))


def load_part(config: VerifierConfig, group: Group = ALONE) -> Engine:
    """A rank's part of the target. Raises CheckpointError, and ConfigError for what this machine does not have."""
    if config.kv_memory is not None and (config.heads or config.features):
        raise ConfigError("kv_memory: heads and features are of texts that are read once; leave it out, or them")
    rows = None if config.context is None else config.context + SCRATCH
    folder = checkpoint_folder(config.model)
    engine = load_engine(
        folder,
        backend=config.backend,
        dtype=config.dtype,
        device=config.device,
        slots=config.slots,
        rows=rows,
        threads=config.threads,
        numerics=config.numerics,
        group=group,
        features=_wanted_features(config, folder),
        kv_memory=config.kv_memory,
    )
    if config.context is not None:
        engine.context = min(engine.context, config.context)  # there are no rows for more
    return engine
