"""The one Decode stream to a verifier, which carries all generations of this router there."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeAlias

import grpc.aio

from outrider.core.session.contract import Plan
from outrider.errors import InternalError, OutriderError, Unavailable
from outrider.rpc import liveness
from outrider.rpc.status import from_rpc_error
from outrider.store.registry import Worker
from outrider.wire import verifier as wire
from outrider.wire.message_bounds import LONG, decode
from outrider.wire.types import plan_to_pb

HEARTBEATS_PER_LEASE = 4
_DECODE = "/outrider.v1.Verifier/Decode"

log = logging.getLogger(__name__)

# What comes for a generation: its start, its prompt's log-probabilities, its commits and its end, the failure of the
# stream, and None when the verifier is alive. Nothing follows an end or a failure.
LinkEvent: TypeAlias = (
    wire.DecodeStarted | wire.PromptScores | wire.DecodeCommit | wire.DecodeEnded | OutriderError | None
)
Receive: TypeAlias = Callable[[LinkEvent], None]  # must not wait


class VerifierLink:
    """An open stream. Messages of one moment go out together."""

    def __init__(self, worker: Worker, channel: grpc.aio.Channel, lease_s: float) -> None:
        """`lease_s`: the verifier ends all generations when this router has been silent for this time."""
        self.closed = False
        self.connected = False
        self._worker = worker
        self._lease_s = lease_s
        self._handles = itertools.count(1)
        self._generations: dict[int, Receive] = {}  # by handle
        self._starts: dict[int, wire.DecodeStart] = {}  # to be sent, as all below
        self._durable: dict[int, int] = {}
        self._plans: dict[int, Plan] = {}
        self._cancelled: list[int] = []
        self._wake = asyncio.Event()
        decoded = partial(decode, wire.DecodeResponse, LONG)
        self._call = channel.stream_stream(_DECODE, wire.DecodeRequest.SerializeToString, decoded)(None)
        # Not read(): once a write has met the end of the call, read() skips the messages that are still unread.
        self._responses = liveness.monitored(aiter(self._call), f"verifier {worker.worker_id}")
        self._running = asyncio.create_task(self._run())

    def begin(self, receive: Receive, start: wire.DecodeStart) -> int:
        """Send a start, and have `receive` called with what comes for the generation. Return its handle."""
        start.handle = handle = next(self._handles)
        self._generations[handle] = receive
        self._starts[handle] = start
        self._wake.set()
        return handle

    def acknowledge(self, handle: int, durable: int) -> None:
        """Send the position below which all of a generation's tokens are in the log."""
        if handle in self._generations:
            self._durable[handle] = durable
            self._wake.set()

    def plan(self, handle: int, plan: Plan) -> None:
        """Send a new plan; of several unsent plans only the latest is sent."""
        if handle in self._generations:
            self._plans[handle] = plan
            self._wake.set()

    def end(self, handle: int) -> None:
        """Give the generation nothing more, and have the verifier end it if it has not ended."""
        if self._generations.pop(handle, None) is None:
            return
        self._durable.pop(handle, None)
        self._plans.pop(handle, None)
        if self._starts.pop(handle, None) is None:
            self._cancelled.append(handle)
            self._wake.set()

    async def close(self) -> None:
        """End the stream, and with it all of its generations."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        """Read and write until the stream ends, and give all generations the reason."""
        writing = asyncio.create_task(self._write())
        error: OutriderError = Unavailable("the stream was closed")
        try:
            await self._read()
            error = Unavailable("ended the stream")
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
        except OutriderError as failure:
            error = failure
        except Exception as failure:
            log.exception("the stream to verifier %s fails", self._worker.worker_id)
            error = InternalError(f"its messages cannot be read: {failure}")
        finally:
            self.closed = True
            writing.cancel()
            self._call.cancel()
            for receive in self._generations.values():
                receive(error)
            self._generations.clear()

    async def _read(self) -> None:
        idle_from = time.monotonic()
        async for response in self._responses:
            for message in itertools.chain(response.started, response.scores, response.commits):
                if (receive := self._generations.get(message.handle)) is not None:
                    receive(message)
            for ended in response.ended:
                if (receive := self._generations.pop(ended.handle, None)) is not None:
                    receive(ended)
            liveness.check_heartbeat(response.heartbeat, f"verifier {self._worker.worker_id}")
            if response.HasField("heartbeat") or time.monotonic() - idle_from >= liveness.HEARTBEAT_S:
                idle_from = time.monotonic()
                for receive in self._generations.values():
                    receive(None)

    async def _write(self) -> None:
        heartbeat_s = min(liveness.HEARTBEAT_S, self._lease_s / HEARTBEATS_PER_LEASE)
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(heartbeat_s):
                        await self._wake.wait()
                self._wake.clear()
                await self._call.write(self._take())
                self.connected = True
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the stream has ended; `_read` raises the reason
        except Exception:
            log.exception("nothing more is sent to verifier %s", self._worker.worker_id)
            self._call.cancel()

    def _take(self) -> wire.DecodeRequest:
        """Return the next message: one start, because it may be long, and all else that is to be sent."""
        request = wire.DecodeRequest(
            acknowledged=self._durable.keys(),
            durable=self._durable.values(),
            plans=[wire.PlanChange(handle=handle, plan=plan_to_pb(plan)) for handle, plan in self._plans.items()],
            cancelled=self._cancelled,
        )
        for sent in (self._durable, self._plans, self._cancelled):
            sent.clear()
        if self._starts:
            request.start.CopyFrom(self._starts.pop(next(iter(self._starts))))
        if self._starts:
            self._wake.set()
        return request


class VerifierLinks:
    """The links of a router, one to each verifier."""

    def __init__(self, channel: Callable[[Worker], grpc.aio.Channel], lease_s: float) -> None:
        self._channel = channel
        self._lease_s = lease_s
        self._links: dict[str, VerifierLink] = {}  # by worker id

    def to(self, worker: Worker) -> VerifierLink:
        """Return the open link to a verifier, or open one."""
        link = self._links.get(worker.worker_id)
        if link is None or link.closed:
            self._links = {name: one for name, one in self._links.items() if not one.closed}
            link = self._links[worker.worker_id] = VerifierLink(worker, self._channel(worker), self._lease_s)
        return link

    async def close(self) -> None:
        """End all streams."""
        await asyncio.gather(*(link.close() for link in self._links.values()))
