"""The DrafterGate service: drafters that no router can reach dial in, are listed, and answer calls on their streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import grpc.aio

from outrider.core.session.protocol import SPOKEN
from outrider.errors import InvalidRequest, Unavailable
from outrider.rpc import liveness
from outrider.rpc.drafter_ids import is_drafter_id
from outrider.rpc.lifecycle import task_group
from outrider.rpc.status import errors_as_status
from outrider.rpc.supervision import keep_running
from outrider.store.registry import Registry, Worker
from outrider.wire import drafter as wire
from router.api.auth import Authenticator, caller_tenant
from router.scheduling.gate import GatedDrafter
from router.scheduling.workers import WorkerPool, protocols

JUDGED_S = 2.0  # between two looks at a drafter's key
HEARTBEAT_S = 1.0
ENTRY_S = 3.0  # how long an entry in the registry counts
MAX_NUMBER = 2**31 - 1  # of vocabulary, context and slots

Context = grpc.aio.ServicerContext[Any, Any]


class GateServicer:
    """The DrafterGate service."""

    def __init__(
        self, worker_pool: WorkerPool, registry: Registry, router_id: str, authenticator: Authenticator
    ) -> None:
        self._worker_pool = worker_pool
        self._authenticator = authenticator
        self._registry = registry
        self._router_id = router_id

    def register(self, server: grpc.aio.Server) -> str:
        """Add the service to a server. Return its full name."""
        name = wire.DESCRIPTOR.services_by_name["DrafterGate"].full_name
        handlers = {
            "Connect": grpc.stream_stream_rpc_method_handler(
                self.Connect, wire.GateUp.FromString, wire.GateDown.SerializeToString
            ),
            "Targets": grpc.unary_unary_rpc_method_handler(
                self.Targets, wire.TargetsRequest.FromString, wire.TargetList.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        return name

    async def Targets(self, request: wire.TargetsRequest, context: Context) -> wire.TargetList:
        """Name the targets that the caller's key is for."""
        key = await self._authenticator.key(context, wire.TARGETS)
        verifiers = (it for it in self._worker_pool.listed if it.role == "verifier" and not it.treeless)
        return wire.TargetList(
            targets=[
                wire.DraftTarget(
                    model=it.model,
                    tokenizer_digest=it.tokenizer_digest,
                    weights=it.weights,
                    pass_us=round(1e6 * it.pass_s),
                )
                for it in verifiers
                if key is None or not key.models or it.model in key.models
            ]
        )

    async def Connect(self, requests: AsyncIterator[wire.GateUp], context: Context) -> None:
        """Serve one drafter's stream for as long as it is open."""
        async with (
            errors_as_status(context),
            aclosing(aiter(requests)) as messages,  # type: ignore[type-var]  # gRPC's are generators
            aclosing(liveness.monitored(messages, "the drafter")) as frames,
        ):
            key = await self._authenticator.key(context, wire.CONNECT)
            most = MAX_NUMBER if key is None or key.sessions is None else key.sessions
            worker = self._worker(await anext(frames, wire.GateUp()), most)
            drafter = GatedDrafter(worker, caller_tenant(), key.models if key is not None else ())
            with self._worker_pool.gate.holding(drafter):
                async with task_group() as tasks:
                    announcing = tasks.create_task(keep_running("gated drafter", partial(self._announce, drafter)))
                    judging = tasks.create_task(self._judge(context))
                    writing = tasks.create_task(_write(drafter.frames(self._router_id), context))
                    async for frame in frames:
                        if frame.WhichOneof("frame") == "answer":
                            drafter.take(frame.answer)
                        else:
                            drafter.worker = self._same(self._worker(frame, most), drafter.worker)
                            drafter.heard(frame.drafter.sent_us, self._tokens_per_s(drafter.worker))
                    for task in (announcing, judging, writing):
                        task.cancel()

    def _worker(self, frame: wire.GateUp, most: int) -> Worker:
        """Return a drafter's entry for the registry. `most`: slots. Raises InvalidRequest and Unavailable."""
        it = frame.drafter
        if not is_drafter_id(it.drafter_id):
            raise InvalidRequest("drafter_id", "must be a name and eight hexadecimal digits, as drafter-0123abcd")
        if not (0 < it.vocabulary <= MAX_NUMBER and 0 < it.context <= MAX_NUMBER and 0 < it.slots <= MAX_NUMBER):
            raise InvalidRequest("drafter", "must have a vocabulary, a context and slots")
        worker = Worker(
            worker_id=it.drafter_id,
            role="drafter",
            address=f"through {self._router_id}",
            model=it.model,
            tokenizer_digest=it.tokenizer_digest,
            vocabulary=it.vocabulary,
            context=it.context,
            slots=min(it.slots, most),
            sessions=it.sessions,
            parameters=it.parameters,
            zone=it.zone,
            draining=it.draining,
            trained_for=it.trained_for,
            draws=False,  # nothing but its word says what it drew from
            gate=self._router_id,
            protocol=it.protocol,
        )
        if worker.protocol not in SPOKEN:
            raise Unavailable(f"the drafter {protocols(worker)}")
        return worker

    def _same(self, worker: Worker, before: Worker) -> Worker:
        """Return what a drafter says of itself now. Raises InvalidRequest if it is another one."""
        if replace(worker, sessions=0, draining=False) != replace(before, sessions=0, draining=False):
            raise InvalidRequest("drafter", "has changed; open another stream")
        return worker

    def _tokens_per_s(self, drafter: Worker) -> float:
        """Return what the verifiers of a drafter's tokenizer commit."""
        verifiers = (it for it in self._worker_pool.listed if it.role == "verifier")
        return sum(it.tokens_per_s for it in verifiers if it.tokenizer_digest == drafter.tokenizer_digest)

    async def _judge(self, context: Context) -> None:
        """Raise as the authenticator does, once a drafter's key is not good any more."""
        while True:
            await asyncio.sleep(JUDGED_S)
            with suppress(Unavailable):  # of Redis
                await self._authenticator.tenant(context, wire.CONNECT)

    async def _announce(self, drafter: GatedDrafter) -> None:
        """Keep a drafter listed, for other routers' pages and `outrider top`."""
        try:
            while True:
                await self._registry.announce(drafter.worker, ENTRY_S)
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            await self._registry.withdraw(drafter.worker)


async def _write(frames: AsyncIterator[wire.GateDown], context: Context) -> None:
    async for frame in frames:
        await context.write(frame)
