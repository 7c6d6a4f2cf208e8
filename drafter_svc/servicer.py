"""The Drafter service: routers attach sessions and detach them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
from opentelemetry.trace import INVALID_SPAN, Span

from drafter_svc.ngram_drafter import NgramScheduler
from drafter_svc.scheduler import DraftScheduler
from drafter_svc.tracing import TracedDrafts
from drafter_svc.translator import Translator
from drafter_svc.upstreams.upstream import Attachment, Route
from drafter_svc.upstreams.upstream_pool import UpstreamPool
from outrider.config import DrafterConfig
from outrider.core.session.speculation_status import printable
from outrider.errors import InvalidRequest, Moved, Overloaded
from outrider.rpc.status import errors_as_status
from outrider.rpc.tracing import server_span
from outrider.store.registry import TOP, Worker
from outrider.telemetry.metrics import register_metric
from outrider.upstream.servicer import UpstreamServicer
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import drafter_pb2_grpc, types_pb2
from outrider.wire.drafter import NO_FEATURES, WantedFeatures
from outrider.wire.tickets import OWN_TENANT

Context = grpc.aio.ServicerContext
log = logging.getLogger(__name__)

AnyScheduler = DraftScheduler | NgramScheduler | Translator


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a drafter can serve."""

    tokenizer_digest: bytes
    vocabulary: int
    context: int  # tokens of a session
    slots: int  # sessions at once
    parameters: int  # of its model; 0: there is no model
    trained_for: str = ""  # digest of the target that its model's card names; "": any
    features: WantedFeatures = NO_FEATURES  # the features that its model drafts from


class DrafterServicer(drafter_pb2_grpc.DrafterServicer):
    """Serves the routers, and describes this drafter to them."""

    def __init__(
        self,
        config: DrafterConfig,
        worker_id: str,
        capacity: Capacity,
        upstreams: UpstreamPool,
        scheduler: AnyScheduler,
        stream_servicer: UpstreamServicer | None = None,
    ) -> None:
        """`stream_servicer`: serves the lower tier."""
        self.worker_id = worker_id
        self.capacity = capacity
        self.stream_servicer = stream_servicer
        self.draining = False
        self.let_go = ""  # why it was last detached from a session that goes on
        # The address of a session's upstream, or of the tunnel that leads there; and a route, if it needs one.
        self.way_to: Callable[[pb.AttachRequest], tuple[str, Route | None]] = lambda request: (
            config.via or request.upstream,
            None,
        )
        self._config = config
        self.upstreams = upstreams
        self.scheduler = scheduler

    async def Attach(self, request: pb.AttachRequest, context: Context[Any, Any]) -> pb.AttachResponse:
        """See `attach`."""
        async with errors_as_status(context), server_span(context, "outrider.v1.Drafter/Attach") as call:
            return self.attach(request, call.span)

    def attach(self, request: pb.AttachRequest, span: Span = INVALID_SPAN) -> pb.AttachResponse:
        """Draft for a session. Repeating it changes nothing; another upstream or a higher epoch replaces it.

        Raises InvalidRequest, Moved and Overloaded.
        """
        if not request.session_id or not request.upstream:
            raise InvalidRequest("session_id", "and upstream must both be given")
        if self.draining:
            raise Moved("this drafter is going down; ask another one")
        address, route = self.way_to(request)
        if found := self.upstreams.find(request.session_id):
            upstream, present = found
            if request.epoch < present.epoch:
                return pb.AttachResponse()
            if request.epoch == present.epoch and upstream.address == address:
                present.ticket = request.ticket  # for its next subscription
                return upstream.refusals.attach_response(present.key)
            self.upstreams.detach(upstream, present)
        full = self.upstreams.attached >= self.capacity.slots
        if full and not (request.tenant == OWN_TENANT and self.upstreams.make_room(address)):
            raise Overloaded(f"all {self.capacity.slots} slots of this drafter are in use")
        attachment = Attachment(request.session_id, request.tenant, request.epoch, request.ticket)
        if span.is_recording():
            attachment.traced = TracedDrafts(
                span, attachment.session_id, attachment.epoch, self.worker_id, self._config.tier
            )
        upstream = self.upstreams.upstream(address, route)
        upstream.attach(attachment)
        answer = upstream.refusals.attach_response(attachment.key)
        upstream.refusals.forget(attachment.key)
        return answer

    async def Detach(self, request: pb.DetachRequest, context: Context[Any, Any]) -> pb.DetachResponse:
        """See `detach`."""
        return self.detach(request)

    def detach(self, request: pb.DetachRequest) -> pb.DetachResponse:
        """Stop drafting for a session."""
        found = self.upstreams.find(request.session_id)
        if found and found[1].epoch <= request.epoch:
            self.upstreams.detach(*found)
            if request.why:
                self.let_go = printable(request.why)
                log.info("let go by session %s: %s", printable(request.session_id), self.let_go)
        return pb.DetachResponse()

    async def Describe(self, request: types_pb2.DescribeRequest, context: Context[Any, Any]) -> pb.DrafterDescription:
        """Describe this drafter: its model, its capacity and its state."""
        return pb.DrafterDescription(
            worker_id=self.worker_id,
            model=self._config.model_name,
            tokenizer_digest=self.capacity.tokenizer_digest,
            vocabulary=self.capacity.vocabulary,
            context=self.capacity.context,
            slots=self.capacity.slots,
            sessions=len(self.scheduler.members),
            levels=self.scheduler.progress.steps,
            nodes=self.scheduler.nodes,
            refused_frames=self.upstreams.refused,
            tasks=len(asyncio.all_tasks()),
            tier=self._config.tier,
            drafters=self.stream_servicer.streams if self.stream_servicer is not None else 0,
            refusals=self.upstreams.refusals,
        )

    def describe(self, address: str) -> Worker:
        """Return the drafter's entry in the registry."""
        return Worker(
            worker_id=self.worker_id,
            role="drafter",
            address=self._config.advertise or address,
            model=self._config.model_name,
            tokenizer_digest=self.capacity.tokenizer_digest,
            vocabulary=self.capacity.vocabulary,
            context=self.capacity.context,
            slots=self.capacity.slots,
            sessions=len(self.scheduler.members),
            parameters=self.capacity.parameters,
            tier=self._config.tier,
            above=TOP if self._config.upstream_tier is None else self._config.upstream_tier,
            serves=self.stream_servicer is not None,
            zone=self._config.zone,
            draining=self.draining,
            trained_for=self.capacity.trained_for,
            draws=self._config.drafts == "model" and self._config.target is None,
        )

    def register_metrics(self) -> None:
        """Register the drafter's gauges and counters under their catalogue names."""
        scheduler, stream_servicer = self.scheduler, self.stream_servicer
        register_metric("outrider.sessions", lambda: len(scheduler.members))
        register_metric("outrider.draft.passes", lambda: scheduler.progress.steps)
        register_metric("outrider.draft.nodes", lambda: scheduler.nodes)
        if isinstance(scheduler, DraftScheduler):
            register_metric("outrider.kv.preemptions", lambda: scheduler.members.preempted)
            register_metric(
                "outrider.draft.agreed", lambda: sum(agreed for agreed, _ in scheduler.fits.agreement().values())
            )
            register_metric(
                "outrider.draft.compared", lambda: sum(compared for _, compared in scheduler.fits.agreement().values())
            )
        register_metric("outrider.drafters", lambda: stream_servicer.streams if stream_servicer is not None else 0)
        register_metric(
            "outrider.frames.refused",
            lambda: self.upstreams.refused + (stream_servicer.refused if stream_servicer is not None else 0),
        )

    def begin_drain(self) -> None:
        """Take no more sessions, and detach from all sessions, upstream and in the lower tier."""
        self.draining = True
        self.upstreams.detach_all()
        if self.stream_servicer is not None:
            self.stream_servicer.begin_drain()
