"""The connection to a router, and the classification of its failures."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio

from outrider.client._calls import AnswerStream, GeneratingCall, PlainCall, RoutedCall
from outrider.client._connection import Access, Metadata
from outrider.errors import Cancelled, DeadlineExceeded, InvalidRequest, Moved, OutriderError, Unavailable
from outrider.rpc.channels import open_channel
from outrider.rpc.status import from_rpc_error, is_from_outrider
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import inference_pb2_grpc

CLOSED = "the client was closed"
RETRIES = 2  # default number of retries of a generation that the router refuses for lack of capacity
LONGEST_WAIT_S = 30.0  # longest pause requested by a router that the client waits for; beyond it the caller decides
ANSWERS_PAUSE_S = 1.0  # before another stream of answers, when the last one has failed or the router has none
_PAUSES_S = (0.1, 0.3)  # before the retries of a unary call

Ending = Callable[[str], Coroutine[Any, Any, None]]  # ends a stream, for a reason


class Router:
    """The channel to a router. The first call opens it, because a channel belongs to the event loop that runs then."""

    def __init__(self, address: str, access: Access, retries: int = RETRIES) -> None:
        self.address = address
        self.retries = retries
        self.was_reached = False  # at least one call reached a server
        self.endings: set[Ending] = set()  # of the running streams
        self.metadata = access.metadata  # of every call
        self._access = access
        self._closed = False
        self._channel: grpc.aio.Channel | None = None
        self._answers: AnswerStream | None = None
        self._refused_until = 0.0  # monotonic time; no stream of answers is opened before

    @property
    def stub(self) -> Any:
        """An InferenceStub; it is generated without types. Raises RuntimeError when the client is closed."""
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._channel is None:
            self._channel = open_channel(self.address, self._access.tls, self._access.server_name)
        return inference_pb2_grpc.InferenceStub(self._channel)

    async def ask(self, method: str, request: Any, timeout: float | None, metadata: Metadata | None = None) -> Any:
        """Return the response of a unary call, with the connection's metadata unless there is other `metadata`.

        All unary calls are idempotent, so a call is repeated when its router was lost.
        """
        metadata = self.metadata if metadata is None else metadata
        check_timeout(timeout)
        give_up = math.inf if timeout is None else time.monotonic() + timeout
        pauses = iter(_PAUSES_S)
        while True:
            left = None if timeout is None else max(0.0, give_up - time.monotonic())
            try:
                answer = await getattr(self.stub, method)(request, timeout=left, metadata=metadata)
                self.was_reached = True
                return answer
            except grpc.aio.AioRpcError as error:
                known = self.failure(error)
                pause = jittered(next(pauses, math.inf))
                if not self._is_lost(error, known) or time.monotonic() + pause >= give_up:
                    raise known from None
            except asyncio.CancelledError:
                if task_is_cancelled():
                    raise
                raise Cancelled(CLOSED) from None
            await asyncio.sleep(pause)

    def generate(
        self, request: pb.GenerateRequest | pb.ResumeRequest, timeout: float | None, metadata: Metadata
    ) -> GeneratingCall:
        """Make a call that generates. While several streams run, their events come together."""
        stub = self.stub
        method = stub.Resume if isinstance(request, pb.ResumeRequest) else stub.Generate
        metadata = (*self.metadata, *metadata)
        answers = self._answer_stream()
        if answers is None:
            request.ClearField("route")
            return PlainCall(method(request, timeout=timeout, metadata=metadata), self.failure)
        request.route.CopyFrom(answers.next_route())
        return RoutedCall(method(request, timeout=timeout, metadata=metadata), self.failure, answers)

    def _answer_stream(self) -> AnswerStream | None:
        """Return the stream for the events of a further call; None while only one stream runs."""
        if self._answers is None and len(self.endings) > 1 and time.monotonic() >= self._refused_until:
            self._answers = AnswerStream(self.stub.Answers(metadata=self.metadata), self._on_answers_ended)
        return self._answers

    def _on_answers_ended(self, answers: AnswerStream, error: grpc.aio.AioRpcError | None) -> None:
        if self._answers is answers:
            self._answers = None
        if error is not None:
            self._refused_until = time.monotonic() + ANSWERS_PAUSE_S

    async def listen(self, method: str, request: Any) -> AsyncGenerator[Any, None]:
        """Yield the messages of a streaming call until it ends."""
        call = getattr(self.stub, method)(request, metadata=self.metadata)
        try:
            async for message in call:
                if message is None:  # gRPC's value for bytes that do not parse
                    raise Unavailable("the router has sent bytes that are no message of this protocol")
                self.was_reached = True
                yield message
        except grpc.aio.AioRpcError as error:
            raise self.failure(error) from None
        finally:
            call.cancel()

    def _is_lost(self, error: grpc.aio.AioRpcError, known: OutriderError) -> bool:
        """Return whether the router itself was lost, and not a server behind it."""
        lost = self.was_reached and isinstance(known, Unavailable) and not is_from_outrider(error)
        return lost or isinstance(known, Moved)

    def failure(self, error: grpc.aio.AioRpcError) -> OutriderError:
        """Return the OutriderError to raise for an error of gRPC."""
        known = from_rpc_error(error)
        state = self._channel.get_state() if self._channel else None
        # A channel is idle after a lost connection, but not after a connection that was never established.
        self.was_reached |= state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE)
        if isinstance(known, Moved):
            return known
        if isinstance(known, Unavailable | DeadlineExceeded) and state is not grpc.ChannelConnectivity.READY:
            what = "what listens there speaks HTTP, as a gateway does" if "HTTP/2" in str(known) else known
            return Unavailable(f"no router can be reached at {self.address}: {what}")
        return known

    async def close(self) -> None:
        """End the running streams, here and on the server, and disconnect."""
        await asyncio.gather(*(end(CLOSED) for end in self.endings))
        self._closed = True
        if self._answers is not None:
            self._answers.end()
        if self._channel is not None:
            await self._channel.close(None)


def jittered(pause_s: float) -> float:
    """Return the pause with random jitter, so that the clients of a dead or full router do not all retry at once."""
    return pause_s * random.uniform(1.0, 1.5)


def task_is_cancelled() -> bool:
    """Return whether this task was cancelled, and not only the call that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def check_timeout(timeout: float | None) -> None:
    """Raise InvalidRequest for a timeout that is not positive."""
    if timeout is not None and not timeout > 0:
        raise InvalidRequest("timeout", f"is {timeout}, must be above 0 seconds, or None for no limit")
