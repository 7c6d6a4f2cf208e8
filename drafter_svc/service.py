"""The Drafter service, and how a drafter starts: loads its model, serves until cancelled."""

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

from drafter_svc.finder import Finder
from drafter_svc.grower import Grower
from drafter_svc.learning import Learner, Own
from drafter_svc.settings import check_settings
from drafter_svc.told import NO_FEATURES, Wanted
from drafter_svc.traced import TracedDrafts
from drafter_svc.translator import Translator
from drafter_svc.upstream import Attachment, Upstream
from outrider.config import DrafterConfig
from outrider.core.lookup import Lookups
from outrider.core.tree import Delta
from outrider.engine.card import read_card, weights_digest
from outrider.engine.checkpoint import read_tokenizer_digest
from outrider.engine.engine import SCRATCH, Engine
from outrider.engine.group import ALONE, Group
from outrider.engine.loading import load_engine, needing_torch, outline
from outrider.engine.ranks import lead
from outrider.engine.threads import briefly
from outrider.errors import ConfigError, InvalidRequest, Moved, Overloaded
from outrider.hub import checkpoint_folder
from outrider.rpc.server import serving
from outrider.rpc.spans import served
from outrider.rpc.status import translated
from outrider.rpc.supervision import supervising
from outrider.rpc.tls import Tls
from outrider.sink.keyring import Keyring
from outrider.sink.sink import Sink
from outrider.store.client import connect
from outrider.store.registry import TOP, Worker, keep_announced
from outrider.store.tickets import ticket_key
from outrider.store.versions import Versions
from outrider.telemetry.metrics import watch
from outrider.telemetry.process import telling
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
    """What a drafter can take."""

    tokenizer_digest: bytes
    vocabulary: int
    context: int  # tokens of a session
    slots: int  # sessions at once
    parameters: int  # of its model; 0: it has none
    trained_for: str = ""  # digest of the target that its model's card names; "": any
    features: Wanted = NO_FEATURES  # that it drafts from


class Roster(DrafterServicer):
    """Which sessions to draft for, as the routers say, and the stream to each upstream."""

    def __init__(self, config: DrafterConfig, worker_id: str, capacity: Capacity, sink: Sink | None = None) -> None:
        """`sink`: takes trees from a lower tier."""
        self.sink = sink
        self.tls = Tls.read(config.ca, config.cert, config.key)
        self._config = config
        self._worker_id = worker_id
        self._capacity = capacity
        self._refused = 0
        self._leaving = False
        self._upstreams: dict[str, Upstream] = {}
        self._closing: set[asyncio.Task[None]] = set()  # streams that were idle
        self._loop: Loop

    def serve(self, loop: Loop) -> None:
        """Has `loop` do the drafting. Called once, before the first call."""
        self._loop = loop

    async def Attach(self, request: pb.AttachRequest, context: Context[Any, Any]) -> pb.AttachResponse:
        """Drafts for a session. Repeating it changes nothing; another upstream or a higher epoch replaces what was."""
        async with translated(context), served(context, "outrider.v1.Drafter/Attach") as call:
            if not request.session_id or not request.upstream:
                raise InvalidRequest("session_id", "and upstream must both be given")
            if self._leaving:
                raise Moved("this drafter is going down; ask another one")
            upstream, present = self._find(request.session_id)
            if present and upstream and request.epoch < present.epoch:
                return pb.AttachResponse()
            if present and upstream and request.epoch == present.epoch and upstream.address == self._way(request):
                present.ticket = request.ticket  # for the next time it subscribes
                return upstream.refusals.answer(present.key)
            if present and upstream:
                self._drop(upstream, present)
            if sum(len(upstream.attachments) for upstream in self._upstreams.values()) >= self._capacity.slots:
                raise Overloaded(f"all {self._capacity.slots} slots of this drafter are in use")
            attachment = Attachment(request.session_id, request.tenant, request.epoch, request.ticket)
            if call.span.is_recording():
                attachment.traced = TracedDrafts(call.span, attachment, self._worker_id, self._config.tier)
            upstream = self._reach(self._way(request))
            upstream.attach(attachment)
            answer = upstream.refusals.answer(attachment.key)
            upstream.refusals.forget(attachment.key)
            return answer

    async def Detach(self, request: pb.DetachRequest, context: Context[Any, Any]) -> pb.DetachResponse:
        """Stops drafting for a session."""
        upstream, present = self._find(request.session_id)
        if present and upstream and present.epoch <= request.epoch:
            self._drop(upstream, present)
        return pb.DetachResponse()

    async def Describe(self, request: types_pb2.DescribeRequest, context: Context[Any, Any]) -> pb.DrafterDescription:
        """What this drafter is and does."""
        return pb.DrafterDescription(
            worker_id=self._worker_id,
            model=self._config.model_name,
            tokenizer_digest=self._capacity.tokenizer_digest,
            vocabulary=self._capacity.vocabulary,
            context=self._capacity.context,
            slots=self._capacity.slots,
            sessions=len(self._loop.members),
            levels=self._loop.progress.steps,
            nodes=self._loop.nodes,
            refused_frames=self._refused,
            tasks=len(asyncio.all_tasks()),
            tier=self._config.tier,
            drafters=self.sink.streams if self.sink is not None else 0,
            refusals=[
                f"{one.address}: {why}"
                for one in self._upstreams.values()
                if (why := one.refusals.standing(attached=bool(one.attachments)))
            ],
        )

    def describe(self, address: str) -> Worker:
        """The entry in the registry."""
        return Worker(
            worker_id=self._worker_id,
            role="drafter",
            address=self._config.advertise or address,
            model=self._config.model_name,
            tokenizer_digest=self._capacity.tokenizer_digest,
            vocabulary=self._capacity.vocabulary,
            context=self._capacity.context,
            slots=self._capacity.slots,
            sessions=len(self._loop.members),
            parameters=self._capacity.parameters,
            tier=self._config.tier,
            above=TOP if self._config.upstream_tier is None else self._config.upstream_tier,
            serves=self.sink is not None,
            zone=self._config.zone,
            draining=self._leaving,
            trained_for=self._capacity.trained_for,
            draws=self._config.drafts == "model" and self._config.target is None,
        )

    def learner(self, grower: Grower, versions: Versions) -> Learner:
        """What keeps its model up to date."""
        config, capacity = self._config, self._capacity
        own = Own(
            checkpoint_folder(config.model),
            capacity.tokenizer_digest,
            capacity.vocabulary,
            capacity.context,
            capacity.trained_for,
        )
        return Learner(grower, versions, own, lambda folder: load_part(config.model_copy(update={"model": folder})))

    def tell(self) -> None:
        """Has what may be asked of it at any time be told, by the names of the catalogue."""
        loop, sink = self._loop, self.sink
        watch("outrider.sessions", lambda: len(loop.members))
        watch("outrider.draft.passes", lambda: loop.progress.steps)
        watch("outrider.draft.nodes", lambda: loop.nodes)
        if isinstance(loop, Grower):
            watch("outrider.kv.preemptions", lambda: loop.preempted)
            watch("outrider.draft.agreed", lambda: sum(agreed for agreed, _ in loop.agreement().values()))
            watch("outrider.draft.judged", lambda: sum(judged for _, judged in loop.agreement().values()))
        watch("outrider.drafters", lambda: sink.streams if sink is not None else 0)
        watch("outrider.frames.refused", lambda: self._refused + (sink.refused if sink is not None else 0))

    def leave(self) -> None:
        """Takes no more sessions, and detaches from those that there are, above and below."""
        self._leaving = True
        for upstream in self._upstreams.values():
            for attachment in [*upstream.attachments.values()]:
                self._drop(upstream, attachment)
        if self.sink is not None:
            self.sink.leave()

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
        self._loop.closed(attachment)

    def _way(self, request: pb.AttachRequest) -> str:
        """The address to draft for it at."""
        return self._config.via or request.upstream

    def _reach(self, address: str) -> Upstream:
        """The stream to an upstream, or to the tunnel that leads there. Has others end that were idle for long. It
        waits for nothing: between a look at who is attached and an attachment nothing may come."""
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
                self._loop,
                self._count_refusal,
                self.tls,
                self._capacity.features,
            )
        return self._upstreams[address]

    def send(self, attachment: Attachment, delta: Delta, plan_version: int, exhausted: bool) -> None:
        """New nodes of a session."""
        upstream, _ = self._find(attachment.session_id)
        if upstream:
            upstream.send(attachment, delta, plan_version, exhausted)

    def resync(self, attachment: Attachment) -> None:
        """A session's copy drifted: it needs a snapshot."""
        upstream, _ = self._find(attachment.session_id)
        if upstream:
            self._refused += 1
            upstream.renew(attachment, "this drafter's copy was another one than the upstream's time and again")

    def _count_refusal(self) -> None:
        self._refused += 1


def load_part(config: DrafterConfig, group: Group = ALONE) -> Engine:
    """A rank's part of the draft model.

    Raises CheckpointError, and ConfigError for what this checkpoint or machine does not have.
    """
    if config.kv_memory is not None and config.heads is not None:
        raise ConfigError("kv_memory: the memory of drafters with heads has no bound; leave it out, or heads")
    if config.heads is not None:
        with needing_torch("heads"):
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
        engine.context = min(engine.context, config.context)  # there are no rows for more
    if engine.treeless:
        raise ConfigError(f"model: {config.model} cannot draft, for it cannot grow a tree: {engine.treeless}")
    return engine


def _wanted(config: DrafterConfig, engine: Engine) -> Wanted:
    """The features that its heads draft from."""
    if config.heads is None:
        return NO_FEATURES
    from outrider.engine.heads.fusing import fusion_digest

    return Wanted(fusion_digest(checkpoint_folder(config.heads)), engine.fed)


Loop = Grower | Finder | Translator


def with_model(
    config: DrafterConfig, worker_id: str, keys: Keyring, group: Group = ALONE
) -> tuple[Roster, Grower | Translator]:
    """A drafter that has a model, and its loop. `keys`: of the tickets that a lower tier shows."""
    engine = lead(load_part(config, group), group)
    capacity = Capacity(
        engine.tokenizer_digest,
        engine.vocabulary,
        engine.context,
        config.slots,
        engine.parameters,
        _trained_for(config),
        _wanted(config, engine),
    )
    if config.target is None:
        sink = Sink(worker_id, capacity.tokenizer_digest, keys) if config.serves else None
        roster = Roster(config, worker_id, capacity, sink)
        grower = _grower(config, engine, roster.send, roster.resync, sink)
        roster.serve(grower)
        if sink is not None:
            sink.serve(grower)
        return roster, grower
    folders = [checkpoint_folder(checkpoint, weights=False) for checkpoint in (config.target, config.model)]
    digest, vocabulary = read_tokenizer_digest(folders[0]), outline(folders[0]).vocabulary
    roster = Roster(config, worker_id, replace(capacity, tokenizer_digest=digest, vocabulary=vocabulary))
    tokenizers = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in folders)
    translator = Translator(*tokenizers, send=roster.send, resync=roster.resync)
    translator.serve(_grower(config, engine, translator.take, translator.reopen))
    roster.serve(translator)
    return roster, translator


def _trained_for(config: DrafterConfig) -> str:
    """The digest of the target that it drafts for alone; "": it drafts for any. Raises CheckpointError."""
    folder = checkpoint_folder(config.model)
    if config.heads is not None:
        return weights_digest(folder)
    card = None if config.any_target else read_card(folder)
    return card.target_digest if card else ""


def _grower(
    config: DrafterConfig,
    engine: Engine,
    send: Callable[[Attachment, Delta, int, bool], None],
    resync: Callable[[Attachment], None],
    sink: Sink | None = None,
) -> Grower:
    return Grower(
        engine,
        level_nodes=config.level_nodes,
        prefill_chunk=config.prefill_chunk,
        send=send,
        resync=resync,
        tree=config.tree,
        below=sink,
    )


def without_model(config: DrafterConfig, worker_id: str) -> tuple[Roster, Finder]:
    """A drafter that has none, and its loop. Of the checkpoint, only the tokenizer and the configuration are read."""
    assert config.drafts != "model"
    folder = checkpoint_folder(config.model, weights=False)
    model = outline(folder, config.backend)
    digest = read_tokenizer_digest(folder)
    lookups = Lookups.open(config.drafts, config.store, digest)
    roster = Roster(config, worker_id, Capacity(digest, model.vocabulary, model.context, config.slots, 0))
    finder = Finder(lookups, slots=config.slots, send=roster.send, resync=roster.resync)
    roster.serve(finder)
    return roster, finder


async def run(config: DrafterConfig, redis_url: str, *, announce: Callable[[str], None], group: Group = ALONE) -> None:
    """Serves until cancelled. `announce` hears the bound address once calls are answered; `group`: the ranks that share
    the model, of which this is the first.

    Raises CheckpointError when the model cannot be loaded, ConfigError when it cannot be had as configured, or the
    address cannot be bound, TokenizerMismatch for a store of another tokenizer.
    """
    check_settings(config)
    worker_id = f"drafter-{secrets.token_hex(4)}"
    roster: Roster
    loop: Loop
    redis = connect(redis_url)
    if config.drafts == "model":
        keys = Keyring(await ticket_key(redis), partial(ticket_key, redis))
        roster, loop = await asyncio.to_thread(briefly, partial(with_model, config, worker_id, keys, group))
    else:
        roster, loop = without_model(config, worker_id)

    def register(server: grpc.aio.Server) -> list[str]:
        add_DrafterServicer_to_server(roster, server)
        services = ["Drafter"]
        if roster.sink is not None:
            add_TreeSinkServicer_to_server(roster.sink, server)
            services.append("TreeSink")
        return [pb.DESCRIPTOR.services_by_name[name].full_name for name in services]

    changed = asyncio.Event()  # what it announces

    def leave() -> None:
        roster.leave()
        changed.set()

    roster.tell()
    with telling("drafter", worker_id, config.metrics):
        try:
            async with (
                aclosing(redis),
                supervising() as tasks,
                serving(
                    config.listen, register, drain_s=config.drain_s, leave=leave, tls=roster.tls, probes=config.health
                ) as address,
            ):
                tasks.need("growth", loop.run)
                if config.learns and isinstance(loop, Grower):
                    tasks.keep("learning", roster.learner(loop, Versions(redis, config.model_name)).run)
                describe = partial(roster.describe, address)
                tasks.keep("announcement", partial(keep_announced, redis_url, describe, config.heartbeat_s, changed))
                announce(address)
                await asyncio.Event().wait()  # until cancelled; the loop goes on until the server has drained
        finally:
            await roster.close()
