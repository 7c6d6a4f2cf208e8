"""The client for asyncio. It is the only implementation; `Client` drives it from a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

from outrider.client import _wire
from outrider.client._types import Chunk, Generation, Model
from outrider.client._wire import Options
from outrider.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    OutriderError,
    Unavailable,
)
from outrider.rpc.channels import open_channel
from outrider.rpc.status import from_rpc_error
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import inference_pb2_grpc

CANCEL_TIMEOUT_S = 2.0


class AsyncClient:
    """A connection to the router at `address` ("host:port"), made with the first call.

    Every call raises the errors of `outrider.errors`: InvalidRequest, NotFound, Overloaded, Unavailable,
    DeadlineExceeded when `timeout` (seconds, None for no limit) passes, and so on. Use it on one event loop,
    as an async context manager or with `close`. A bad address raises ConfigError.
    """

    def __init__(self, address: str = "127.0.0.1:7070") -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"address: is {address!r}, must be HOST:PORT, for example 127.0.0.1:7070")
        self._router = _Router(address)

    async def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """The whole answer to a prompt, given as text or as token ids. See `Options` for the keywords."""
        stream = self.stream(prompt, timeout=timeout, **options)
        async for _ in stream:
            pass
        return stream.result

    def stream(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """The answer as it comes. The call starts with the first chunk that is asked for."""
        _check_timeout(timeout)
        return AsyncStream(self._router, _wire.request_to_pb(prompt, **options), timeout)

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """The models that can be asked for right now."""
        _check_timeout(timeout)
        try:
            response = await self._router.stub.ListModels(pb.ListModelsRequest(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise self._router.failure(error) from None
        return [_wire.model_from_pb(model) for model in response.models]

    async def close(self) -> None:
        """Breaks off what still runs and disconnects. Closing twice is fine."""
        await self._router.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncStream:
    """A running generation: iterate over its chunks, then read `result`.

    Leaving the loop early, leaving an `async with` block, or `cancel` ends it on the server too.
    """

    def __init__(self, router: _Router, request: pb.GenerateRequest, timeout: float | None) -> None:
        self._router = router
        self._request = request
        self._timeout = timeout
        self._call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse] | None = None
        self._started: pb.Started | None = None
        self._chunks: list[Chunk] = []
        self._result: Generation | None = None
        self._over = False  # the server knows that the call has ended
        self._cancelled = False

    @property
    def result(self) -> Generation:
        """The whole generation, once the last chunk has come. Raises RuntimeError before."""
        if self._result is None:
            raise RuntimeError("the generation has not ended; read the stream to its end first")
        return self._result

    async def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        if self._call is not None:
            raise RuntimeError("a stream can be read only once")
        try:
            if self._cancelled:
                raise Cancelled("the generation was cancelled before it started")
            self._call = self._router.stub.Generate(self._request, timeout=self._timeout)
            async for event in self._call:
                match event.WhichOneof("event"):
                    case "started":
                        self._started = event.started
                    case "chunk":
                        self._chunks.append(_wire.chunk_from_pb(event.chunk))
                        yield self._chunks[-1]
                    case "finished":
                        self._result = self._finish(event.finished)
                        self._over = True
            if self._result is None:
                raise InternalError("the router ended the stream without a result")
        except grpc.aio.AioRpcError as error:
            self._over = True
            raise self._router.failure(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task but the call was cancelled, from elsewhere.
            who = "the client was closed" if self._router.closed else "the generation was cancelled"
            raise Cancelled(who) from None
        finally:
            await self.cancel()

    async def cancel(self) -> None:
        """Ends the generation, if it still runs, on the server too; who reads the stream gets Cancelled."""
        if self._cancelled or self._over:
            return
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()
        if self._started is not None and not self._router.closed:
            # A call that merely breaks may be resumed for a while; this one shall not be.
            with suppress(grpc.aio.AioRpcError):
                request = pb.CancelRequest(session_id=self._started.session_id)
                await self._router.stub.Cancel(request, timeout=CANCEL_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cancel()

    def _finish(self, message: pb.Finished) -> Generation:
        if self._started is None:
            raise InternalError("the router's stream did not begin with Started")
        return Generation(
            text="".join(chunk.text for chunk in self._chunks),
            token_ids=tuple(token for chunk in self._chunks for token in chunk.token_ids),
            gaps=tuple(gap for chunk in self._chunks for gap in chunk.gaps),
            finish_reason=_wire.reason_from_pb(message.reason),
            seed=self._started.seed,
            model=self._started.model,
            session_id=self._started.session_id,
            usage=_wire.usage_from_pb(message.usage),
        )


class _Router:
    """The channel, opened when first needed because it belongs to the event loop of that moment."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel: grpc.aio.Channel | None = None
        self.closed = False

    @property
    def stub(self) -> inference_pb2_grpc.InferenceStub:
        if self.closed:
            raise RuntimeError("the client is closed")
        if self._channel is None:
            self._channel = open_channel(self.address)
        return inference_pb2_grpc.InferenceStub(self._channel)

    def failure(self, error: grpc.aio.AioRpcError) -> OutriderError:
        known = from_rpc_error(error)
        connected = self._channel is not None and self._channel.get_state() is grpc.ChannelConnectivity.READY
        if isinstance(known, Unavailable | DeadlineExceeded) and not connected:
            return Unavailable(f"no router can be reached at {self.address}: {error.details()}")
        return known

    async def close(self) -> None:
        self.closed = True
        if self._channel is not None:
            await self._channel.close(None)


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and not timeout > 0:
        raise InvalidRequest("timeout", f"is {timeout}, must be above 0 seconds, or None for no limit")
