"""The TreeSink service of a router: it passes the streams of drafters at its gate on to verifiers, and back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from outrider.errors import Forbidden, InvalidRequest, NotFound, Overloaded, Unavailable
from outrider.rpc import liveness
from outrider.rpc.lifecycle import task_group
from outrider.rpc.status import errors_as_status, from_rpc_error
from outrider.store.registry import Worker
from outrider.wire import drafter as wire
from outrider.wire.message_bounds import BEFORE_A_TICKET, decode
from router.api.auth import caller_tenant
from router.scheduling.gate import GatedDrafter
from router.scheduling.workers import WorkerPool

MAX_STREAMS = 64  # of one drafter: one to each verifier

Context = grpc.aio.ServicerContext[Any, Any]


class DraftRelay:
    """Relays draft streams as they are: frames are judged where they are taken, and ended by who sends too many."""

    def __init__(self, worker_pool: WorkerPool) -> None:
        self._worker_pool = worker_pool
        self._streams: Counter[str] = Counter()  # by drafter

    def register(self, server: grpc.aio.Server) -> str:
        """Add the service to a server. Return its full name."""
        name = wire.DESCRIPTOR.services_by_name["TreeSink"].full_name
        handler = grpc.stream_stream_rpc_method_handler(self.Draft)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Draft": handler}),))
        return name

    async def Draft(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Relay one stream for as long as both sides keep it open."""
        async with (
            errors_as_status(context),
            aclosing(aiter(requests)) as messages,  # type: ignore[type-var]  # gRPC's are generators
            aclosing(liveness.monitored(messages, "the drafter")) as frames,
        ):
            first = await anext(frames, b"")
            drafter, verifier = self._hello(first), self._upstream(context)
            drafter_id = drafter.worker.worker_id
            if self._streams[drafter_id] >= MAX_STREAMS:
                raise Overloaded(f"{MAX_STREAMS} streams of drafter {drafter_id} are relayed already")
            self._streams[drafter_id] += 1
            call = self._worker_pool.channels.to(verifier).stream_stream(wire.DRAFT, None, None)(None)
            try:
                await call.write(first)
                async with task_group() as tasks:
                    down, gone = tasks.create_task(_down(call, context)), tasks.create_task(_until_gone(drafter))
                    async for frame in frames:
                        await call.write(frame)
                    down.cancel()
                    gone.cancel()
            except asyncio.InvalidStateError:
                raise Unavailable("the upstream has ended the stream") from None
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from None
            finally:
                call.cancel()
                self._streams[drafter_id] -= 1
                self._streams = +self._streams

    def _hello(self, frame: bytes) -> GatedDrafter:
        """Return the drafter that opens a stream. Raises InvalidRequest and Forbidden."""
        message = decode(wire.DraftUp, BEFORE_A_TICKET, frame)
        if message.WhichOneof("frame") != "hello":
            raise InvalidRequest("hello", "must be the first frame of Draft")
        drafter_id: str = message.hello.drafter_id
        drafter = self._worker_pool.gate.get(drafter_id)
        if drafter is None or drafter.tenant != caller_tenant():
            raise Forbidden(f"drafter_id: {drafter_id[:80]!r} has not dialed this router")
        return drafter

    def _upstream(self, context: Context) -> Worker:
        """Return the verifier that a stream is for. Raises NotFound."""
        wanted = next((value for name, value in context.invocation_metadata() or () if name == wire.UPSTREAM_KEY), "")
        for worker in self._worker_pool.listed:
            if worker.worker_id == wanted and worker.role == "verifier":
                return worker
        raise NotFound(f"upstream {wanted!r:.80}: there is no such verifier any more")


async def _until_gone(drafter: GatedDrafter) -> None:
    """Raise Unavailable when a drafter's own stream has ended."""
    await drafter.gone.wait()
    raise Unavailable("the drafter has left the gate")


async def _down(call: Any, context: Context) -> None:
    """Pass on what an upstream sends, until it ends the stream. Raises its error, and Unavailable at its end."""
    async for frame in call:
        await context.write(frame)
    raise Unavailable("the upstream has ended the stream")
