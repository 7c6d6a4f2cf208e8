"""A drafter's stream to a router's gate: it dials out, so it needs no port that others reach."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc.aio

from drafter_svc.servicer import DrafterServicer
from drafter_svc.upstreams.upstream import Route
from outrider.client._connection import Access, resolve
from outrider.errors import ConfigError, Forbidden, OutriderError, Unauthenticated
from outrider.rpc import liveness
from outrider.rpc.backoff import Backoff
from outrider.rpc.channels import open_channel
from outrider.rpc.lifecycle import task_group
from outrider.rpc.status import error_to_pb, from_rpc_error
from outrider.rpc.tls import SERVER
from outrider.wire import drafter as wire

MAX_ANSWERS = 256  # answers that were not sent yet
FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S = 0.2, 5.0, 10.0  # between two attempts to dial
PROBE_S = 2.0  # for an upstream to answer directly
PROBED_S = 60.0  # how long that it did not counts

log = logging.getLogger(__name__)


class GateLink:
    """Dials a router, answers its calls, and finds the way to its verifiers: directly where they can be reached, else
    through the router.
    """

    def __init__(
        self, address: str, ca: Path | None, servicer: DrafterServicer, on_listed: Callable[[str], None]
    ) -> None:
        """`ca`: of the router's certificate; None: as for a client. `on_listed` gets the router's address when it first
        lists the drafter. Raises ConfigError.
        """
        connection = resolve(address, ca=ca)
        self.address = connection.address
        self._access = Access.of(connection)
        self._servicer = servicer
        self._on_listed: Callable[[str], None] | None = on_listed
        self._up: asyncio.Queue[wire.GateUp] = asyncio.Queue(MAX_ANSWERS)
        self._direct: dict[str, bool] = {}  # by the ids of verifiers, whether they were reached
        self._probing: dict[str, float] = {}  # when the last probe of one began
        self._probes: set[asyncio.Task[None]] = set()
        servicer.way_to = self.way_to
        self.round_trip_s = 0.0  # to the router, at the last answer
        self.cluster_tokens_per_s = 0.0
        self.open = False  # whether the router lists this drafter now

    async def run(self) -> None:
        """Dial, and again whenever the stream has ended, until cancelled. Raises ConfigError for a refused key."""
        backoff, said = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, steady_s=STEADY_S), ""
        while True:
            began = time.monotonic()
            try:
                await self._serve()
            except (grpc.aio.AioRpcError, OutriderError) as error:
                known = from_rpc_error(error) if isinstance(error, grpc.aio.AioRpcError) else error
                if isinstance(known, Forbidden | Unauthenticated):
                    raise ConfigError(f"connect: {self.address}: {known}") from None
                if str(known) != said:
                    log.warning("router %s: %s", self.address, known)
                said = str(known)
            backoff.ended_after(time.monotonic() - began)
            await backoff.wait()

    async def _serve(self) -> None:
        async with open_channel(self.address, self._access.tls, self._access.server_name) as channel:
            call = channel.stream_stream(wire.CONNECT, wire.GateUp.SerializeToString, wire.GateDown.FromString)(
                None, metadata=self._access.metadata
            )
            try:
                async with task_group() as tasks:  # when writing fails, reading must end
                    writing = tasks.create_task(self._write(call))
                    async for frame in liveness.monitored(aiter(call), f"router {self.address}"):
                        kind = frame.WhichOneof("frame")
                        if kind == "welcome":
                            self._listed()
                        elif kind == "status":
                            self.round_trip_s = time.monotonic() - frame.status.sent_us / 1e6
                            self.cluster_tokens_per_s = frame.status.tokens_per_ks / 1000
                        elif kind == "call":
                            await self._up.put(wire.GateUp(answer=self._answer(frame.call)))
                    writing.cancel()
            finally:
                self.open = False
                call.cancel()

    def _listed(self) -> None:
        self.open = True
        log.info("listed by router %s", self.address)
        if self._on_listed is not None:
            self._on_listed(self.address)
            self._on_listed = None

    async def _write(self, call: Any) -> None:
        """Send what this drafter is, its answers, and again what it is whenever there was nothing to send."""
        while not self._up.empty():
            self._up.get_nowait()  # answers to calls of an earlier stream
        frame = self._entry()
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader gets the error
            while True:
                await call.write(frame)
                frame = self._entry()
                with suppress(TimeoutError):
                    async with asyncio.timeout(liveness.HEARTBEAT_S):
                        frame = await self._up.get()

    def _entry(self) -> wire.GateUp:
        worker = self._servicer.describe("")
        return wire.GateUp(
            drafter=wire.GatedDrafter(
                drafter_id=worker.worker_id,
                model=worker.model,
                tokenizer_digest=worker.tokenizer_digest,
                vocabulary=worker.vocabulary,
                context=worker.context,
                slots=worker.slots,
                sessions=worker.sessions,
                parameters=worker.parameters,
                trained_for=worker.trained_for,
                zone=worker.zone,
                protocol=worker.protocol,
                draining=worker.draining,
                sent_us=int(1e6 * time.monotonic()),
            )
        )

    def _answer(self, call: wire.GateCall) -> wire.GateAnswer:
        try:
            if call.WhichOneof("request") == "attach":
                return wire.GateAnswer(call=call.call, attached=self._servicer.attach(call.attach))
            return wire.GateAnswer(call=call.call, detached=self._servicer.detach(call.detach))
        except OutriderError as error:
            return wire.GateAnswer(call=call.call, error=error_to_pb(error))

    def way_to(self, request: wire.AttachRequest) -> tuple[str, Route | None]:
        """Return the way to a session's upstream: its address once it was reached there, else the router's relay."""
        upstream = request.upstream_id
        if self._direct.get(upstream):
            return request.upstream, None
        if time.monotonic() - self._probing.get(upstream, float("-inf")) > PROBED_S:
            self._probing[upstream] = time.monotonic()
            probe = asyncio.create_task(self._probe(request.upstream, upstream))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)
        metadata = (*self._access.metadata, (wire.UPSTREAM_KEY, upstream))
        route = Route(self.address, self._access.tls, self._access.server_name, metadata)
        return f"{upstream} through {self.address}", route

    @property
    def relayed(self) -> bool:
        """Whether a stream to a verifier goes through the router."""
        return any(it.attachments and it.route is not None for it in self._servicer.upstreams.upstreams.values())

    async def _probe(self, address: str, upstream_id: str) -> None:
        """Find out whether an upstream answers at its address, and is the one that it should be."""
        upstreams = self._servicer.upstreams
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(PROBE_S), open_channel(address, upstreams.tls, SERVER) as channel:
                serialize, parse = wire.DraftUp.SerializeToString, wire.DraftDown.FromString
                call: Any = channel.stream_stream(wire.DRAFT, serialize, parse)(None)
                await call.write(wire.DraftUp(hello=upstreams.hello))
                async for frame in call:
                    self._direct[upstream_id] = frame is not None and frame.welcome.upstream_id == upstream_id
                    call.cancel()
                    break
        if self._direct.get(upstream_id):
            log.info("verifier %s is reached at %s", upstream_id, address)
