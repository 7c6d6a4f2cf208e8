"""From a configuration to a drafter: its engine or lookups, its scheduler, its streams and its service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from drafter_svc.hot_reload import HotReload, RequiredShape
from drafter_svc.ngram_drafter import NgramScheduler
from drafter_svc.own_adapters import OwnAdapters
from drafter_svc.scheduler import DraftScheduler
from drafter_svc.servicer import Capacity, DrafterServicer
from drafter_svc.translator import Translator
from drafter_svc.upstreams.upstream import Attachment
from drafter_svc.upstreams.upstream_pool import UpstreamPool
from outrider.config import DrafterConfig
from outrider.core.proposers.lookup import Lookups
from outrider.core.tree.delta import Delta
from outrider.engine.checkpoints.checkpoint import (
    read_eos_ids,
    read_tokenizer,
    read_tokenizer_digest,
    tokenizer_source,
)
from outrider.engine.checkpoints.model_card import read_card, weights_digest
from outrider.engine.interface.engine import SCRATCH, Engine
from outrider.engine.loading import load_engine, outline, requires_torch
from outrider.engine.tensor_parallel.group import ALONE, Group
from outrider.engine.tensor_parallel.leader import lead
from outrider.errors import ConfigError
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.place import Patience
from outrider.hub import checkpoint_folder
from outrider.rpc.tls import Tls
from outrider.store.versions import Versions
from outrider.upstream.servicer import UpstreamServicer
from outrider.upstream.ticket_verifier import TicketVerifier
from outrider.wire import drafter as wire
from outrider.wire.drafter import NO_FEATURES, WantedFeatures


def check_settings(config: DrafterConfig) -> None:
    """Raise ConfigError for settings that exclude one another."""
    whole = config.drafts == "model" and config.target is None and config.layers is None and not config.skip
    alone = whole and config.tensor_parallel == 1
    if config.learns and not (alone and config.heads is None):
        raise ConfigError(
            "learns: is for a drafter with a whole model of the target's tokenizer in one rank; give it none of "
            "drafts, target, heads, layers, skip and tensor_parallel"
        )
    if config.adapters is not None and (config.drafts != "model" or config.heads is not None or config.learns):
        raise ConfigError("adapters: are of a model that stays as it is; leave them out, or drafts, heads and learns")
    if config.candidates and (config.connect is None or config.drafts != "model" or config.heads is not None):
        raise ConfigError("candidates: are models of a drafter that dials; give connect, and none of drafts and heads")
    if config.heads is None:
        return
    if not alone or config.any_target or config.upstream_tier is not None:
        raise ConfigError(
            "heads: draft for verifiers of their own target, in one rank; give none of drafts, target, any_target, "
            "layers, skip, tier and tensor_parallel"
        )
    plain = config.dtype in ("auto", "float32", "bfloat16") and config.kv_dtype == "auto"
    if config.backend == "transformers" or not plain:
        raise ConfigError(
            "heads: run on the native backend, in float32 or bfloat16; leave out backend, dtype and kv_dtype"
        )


def load_part(config: DrafterConfig, group: Group = ALONE) -> Engine:
    """Return a rank's part of the draft model.

    Raises CheckpointError, and ConfigError for what this checkpoint or machine does not have.
    """
    if config.kv_memory is not None and config.heads is not None:
        raise ConfigError("kv_memory: does not work with heads, whose memory has no bound; leave it out, or heads")
    if config.heads is not None:
        return _heads_engine(checkpoint_folder(config.heads), config)
    engine = load_engine(
        checkpoint_folder(config.model),
        rows=None if config.context is None else config.context + SCRATCH,
        backend=config.backend,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        device=config.device,
        layers=config.layers,
        skip=config.skip,
        slots=config.slots,
        threads=config.threads,
        numerics=config.numerics,
        group=group,
        kv_memory=config.kv_memory,
        adapters=0 if config.adapters is None else config.max_adapters,
    )
    if config.context is not None:
        engine.context = min(engine.context, config.context)  # there are no KV rows for more
    if engine.treeless:
        raise ConfigError(f"model: {config.model} cannot draft, for it cannot grow a tree: {engine.treeless}")
    return engine


def _heads_engine(folder: Path, config: DrafterConfig) -> Engine:
    """Return the engine of a folder's heads. Raises as `load_part`."""
    target, precise = checkpoint_folder(config.model), config.dtype == "float32"
    with requires_torch("heads"):
        from outrider.engine.heads.eagle_engine import EagleEngine
    if config.device == "cpu":
        return EagleEngine.load(folder, target, precise=precise, slots=config.slots, threads=config.threads)
    from outrider.engine.gpu.eagle.fed_eagle import FedEagle

    engine = FedEagle.load_heads(folder, target, device=config.device, precise=precise, slots=config.slots)
    engine.record()
    return engine


def _wanted_features(config: DrafterConfig, engine: Engine) -> WantedFeatures:
    """Return the features that the drafter's heads draft from."""
    if config.heads is None:
        return NO_FEATURES
    from outrider.engine.heads.fusing import fusion_digest

    return WantedFeatures(fusion_digest(checkpoint_folder(config.heads)), engine.fed_width)


def with_model(
    config: DrafterConfig, worker_id: str, ticket_verifier: TicketVerifier, group: Group = ALONE
) -> DrafterServicer:
    """Return a drafter that has a model. `ticket_verifier`: checks the tickets of a lower tier.

    Raises what `load_part` raises.
    """
    engine = lead(load_part(config, group), group)
    capacity = Capacity(
        tokenizer_digest=engine.tokenizer_digest,
        vocabulary=engine.vocabulary,
        context=engine.context,
        slots=config.slots,
        parameters=engine.parameters,
        trained_for=trained_for(config),
        features=_wanted_features(config, engine),
    )
    if config.target is not None:
        return _translating(config, worker_id, engine, capacity)
    upstreams = _upstream_pool(config, worker_id, capacity)
    lower_tier = UpstreamServicer(worker_id, capacity.tokenizer_digest, ticket_verifier) if config.serves else None
    scheduler = _draft_scheduler(config, engine, upstreams.send, upstreams.resync, lower_tier)
    upstreams.serve(scheduler)
    if lower_tier is not None:
        lower_tier.serve(scheduler)
    return DrafterServicer(config, worker_id, capacity, upstreams, scheduler, lower_tier)


def _translating(config: DrafterConfig, worker_id: str, engine: Engine, capacity: Capacity) -> DrafterServicer:
    """Return a drafter whose tokenizer is not the target's: it drafts by text."""
    assert config.target is not None
    folders = [checkpoint_folder(checkpoint, weights=False) for checkpoint in (config.target, config.model)]
    digest, vocabulary = read_tokenizer_digest(folders[0]), outline(folders[0]).vocabulary
    capacity = replace(capacity, tokenizer_digest=digest, vocabulary=vocabulary)
    upstreams = _upstream_pool(config, worker_id, capacity)
    tokenizers = (read_tokenizer(folder)[0] for folder in folders)
    translator = Translator(*tokenizers, send=upstreams.send, resync=upstreams.resync)
    translator.serve(_draft_scheduler(config, engine, translator.on_delta, translator.reopen))
    upstreams.serve(translator)
    return DrafterServicer(config, worker_id, capacity, upstreams, translator)


def without_model(config: DrafterConfig, worker_id: str) -> DrafterServicer:
    """Return a drafter without a model. Read only the tokenizer and the configuration.

    Raises TokenizerMismatch for a store of another tokenizer.
    """
    assert config.drafts != "model"
    folder = checkpoint_folder(config.model, weights=False)
    model = outline(folder, config.backend)
    digest = read_tokenizer_digest(folder)
    capacity = Capacity(digest, model.vocabulary, model.context, config.slots, 0)
    upstreams = _upstream_pool(config, worker_id, capacity)
    lookups = Lookups.open(config.drafts, config.store, digest)
    scheduler = NgramScheduler(
        lookups,
        slots=config.slots,
        send=upstreams.send,
        resync=upstreams.resync,
        grammars=GrammarCompiler(tokenizer_source(folder), model.vocabulary, read_eos_ids(folder), patience=Patience()),
    )
    upstreams.serve(scheduler)
    return DrafterServicer(config, worker_id, capacity, upstreams, scheduler)


def hot_reload(config: DrafterConfig, capacity: Capacity, scheduler: DraftScheduler, versions: Versions) -> HotReload:
    """Return the task that keeps the drafter's model up to date."""
    required = RequiredShape(
        folder=checkpoint_folder(config.model),
        tokenizer_digest=capacity.tokenizer_digest,
        vocabulary=capacity.vocabulary,
        context=capacity.context,
        trained_for=capacity.trained_for,
    )

    def load(folder: Path) -> Engine:
        return load_part(config.model_copy(update={"model": folder}))

    return HotReload(scheduler, versions, required, load)


def _upstream_pool(config: DrafterConfig, worker_id: str, capacity: Capacity) -> UpstreamPool:
    hello = wire.Hello(
        drafter_id=worker_id,
        tokenizer_digest=capacity.tokenizer_digest,
        vocabulary=capacity.vocabulary,
        public_sources=not config.learns and (config.store is None or config.store_public),
        batches=True,
    )
    return UpstreamPool(hello, own_tls(config), capacity.features)


def own_tls(config: DrafterConfig) -> Tls | None:
    """Return a drafter's own certificate; None: it has none, as one that dials need not. Raises ConfigError."""
    if config.connect is not None and config.cert is None:
        return None
    return Tls.read(config.ca, config.cert, config.key)


def trained_for(config: DrafterConfig) -> str:
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
    stream_servicer: UpstreamServicer | None = None,
) -> DraftScheduler:
    return DraftScheduler(
        engine,
        level_nodes=config.level_nodes,
        prefill_chunk=config.prefill_chunk,
        send=send,
        resync=resync,
        tree=config.tree,
        lower_tier=stream_servicer,
        grammars=GrammarCompiler(
            tokenizer_source(checkpoint_folder(config.model)),
            engine.unpadded_vocabulary,
            engine.eos_ids,
            patience=Patience(),
        ),
        adapters=OwnAdapters(config.adapters, config.max_adapters) if config.adapters is not None else None,
    )
