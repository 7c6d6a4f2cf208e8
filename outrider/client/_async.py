"""The client for asyncio. It is the only implementation; `Client` drives it from a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from outrider.client import _wire
from outrider.client._types import Chunk, Generation, Model, Session
from outrider.client._wire import Options
from outrider.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    OutriderError,
    Overloaded,
    Unavailable,
)
from outrider.rpc.channels import open_channel
from outrider.rpc.status import from_rpc_error
from outrider.v1 import inference_pb2 as pb
from outrider.v1 import inference_pb2_grpc

CANCEL_TIMEOUT_S = 2.0
MOST_FAILURES = 6  # calls in a row that bring nothing, before a stream gives up
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0  # between them


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

    def resume(
        self,
        session: str,
        *,
        generation: int = 0,
        next_position: int = 0,
        text_offset: int = 0,
        timeout: float | None = None,
    ) -> AsyncStream:
        """The latest generation of a session, from behind the last chunk that was received (or from its start).

        Streams resume by themselves while their client lives; this is for another process that goes on with one.
        The result holds what came through this stream. Raises NotFound when it is too late.
        """
        _check_timeout(timeout)
        request = pb.ResumeRequest(
            session_id=session, generation=generation, next_position=next_position, text_offset=text_offset
        )
        return AsyncStream(self._router, request, timeout)

    async def cancel(self, session: str, *, timeout: float | None = None) -> None:
        """Ends a session's generation, wherever it runs and whoever reads it. Fine if it has ended."""
        await self._router.ask("Cancel", pb.CancelRequest(session_id=session), timeout)

    async def create_session(self, model: str = "", *, timeout: float | None = None) -> Session:
        """An empty session for several turns. A generation without one makes its own."""
        return _wire.session_from_pb(
            await self._router.ask("CreateSession", pb.CreateSessionRequest(model=model), timeout)
        )

    async def get_session(self, session: str, *, timeout: float | None = None) -> Session:
        """What is known of a session. Raises NotFound."""
        return _wire.session_from_pb(
            await self._router.ask("GetSession", pb.GetSessionRequest(session_id=session), timeout)
        )

    async def close_session(self, session: str, *, timeout: float | None = None) -> None:
        """Ends a session and has its tokens forgotten. Fine if it was closed before."""
        await self._router.ask("CloseSession", pb.CloseSessionRequest(session_id=session), timeout)

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """The models that can be asked for right now."""
        response = await self._router.ask("ListModels", pb.ListModelsRequest(), timeout)
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

    When the call breaks off, it is resumed behind the last chunk, without a token lost or repeated; a generation
    that somebody else took over is not. Leaving the loop early, leaving an `async with` block, or `cancel` ends it
    on the server too.
    """

    def __init__(self, router: _Router, request: pb.GenerateRequest | pb.ResumeRequest, timeout: float | None) -> None:
        self._router = router
        self._request = request
        self._timeout = timeout
        self._call: grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse] | None = None
        self._started: pb.Started | None = None
        self._chunks: list[Chunk] = []
        self._result: Generation | None = None
        self._resumes = 0
        self._failures = 0  # calls in a row that broke off without a chunk
        self._over = False  # the server knows that the generation has ended
        self._cancelled = False

    @property
    def session_id(self) -> str:
        """The session, once the first chunk has come; empty before."""
        return self._started.session_id if self._started else ""

    @property
    def result(self) -> Generation:
        """The whole generation, once the last chunk has come. Raises RuntimeError before."""
        if self._result is None:
            raise RuntimeError("the generation has not ended; read the stream to its end first")
        return self._result

    async def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        if self._call is not None:
            raise RuntimeError("a stream can be read only once")
        give_up = None if self._timeout is None else time.monotonic() + self._timeout
        try:
            if self._cancelled:
                raise Cancelled("the generation was cancelled before it started")
            while self._result is None:
                left = None if give_up is None else max(0.0, give_up - time.monotonic())
                try:
                    async for chunk in self._listen(left):
                        yield chunk
                except (Unavailable, Overloaded) as error:
                    await self._pause(error, left)
        except OutriderError:
            self._over = True
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not this task but the call was cancelled, from elsewhere.
            who = "the client was closed" if self._router.closed else "the generation was cancelled"
            raise Cancelled(who) from None
        finally:
            await self.cancel()

    async def _listen(self, timeout: float | None) -> AsyncGenerator[Chunk, None]:
        """One call, from where the last one ended."""
        request = self._next_request()
        stub = self._router.stub
        resuming = isinstance(request, pb.ResumeRequest)
        self._call = call = (stub.Resume if resuming else stub.Generate)(request, timeout=timeout)
        try:
            async for event in call:
                self._router.was_reached = True
                match event.WhichOneof("event"):
                    case "started":
                        self._started = self._started or event.started
                    case "chunk":
                        self._failures = 0
                        self._chunks.append(_wire.chunk_from_pb(event.chunk))
                        yield self._chunks[-1]
                    case "finished":
                        self._result = self._finish(event.finished)
                        self._over = True
            if self._result is None:
                raise Unavailable("the router ended the stream without a result")
        except grpc.aio.AioRpcError as error:
            known = self._router.failure(error)
            if isinstance(known, Cancelled) and not self._cancelled:  # a router that is going down ends its calls so
                known = Unavailable(f"the router broke the call off: {known}")
            raise known from None

    def _next_request(self) -> pb.GenerateRequest | pb.ResumeRequest:
        if self._started is None:
            return self._request  # the same idempotency key: it is not generated twice
        last = self._chunks[-1] if self._chunks else None
        first = self._request if isinstance(self._request, pb.ResumeRequest) else None
        return pb.ResumeRequest(
            session_id=self._started.session_id,
            generation=self._started.generation,
            next_position=last.next_position if last else first.next_position if first else 0,
            text_offset=last.text_offset if last else first.text_offset if first else 0,
        )

    async def _pause(self, error: Unavailable | Overloaded, left: float | None) -> None:
        """Waits before the next call; raises the error when it is not worth another one."""
        self._failures += 1
        if self._started is None and (isinstance(error, Overloaded) or not self._router.was_reached):
            raise error
        pause = error.retry_after if isinstance(error, Overloaded) else FIRST_PAUSE_S * 2**self._failures
        if self._failures > MOST_FAILURES or self._router.closed or (left is not None and pause > left):
            raise error
        self._resumes += 1
        await asyncio.sleep(min(pause, LONGEST_PAUSE_S))

    async def cancel(self) -> None:
        """Ends the generation, if it still runs, on the server too; who reads the stream gets Cancelled."""
        if self._cancelled or self._over:
            return
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()
        if self._started is not None and not self._router.closed:
            # A call that merely breaks may be resumed for a while; this one shall not be.
            with suppress(OutriderError):
                await self._router.ask("Cancel", pb.CancelRequest(session_id=self.session_id), CANCEL_TIMEOUT_S)

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
            logprobs=tuple(entry for chunk in self._chunks for entry in chunk.logprobs),
            generation=self._started.generation,
            cached_tokens=self._started.cached_tokens,
            forked_from=self._started.forked_from,
            resumes=self._resumes,
        )


class _Router:
    """The channel, opened when first needed because it belongs to the event loop of that moment."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = False
        self.was_reached = False  # some call got an answer
        self._channel: grpc.aio.Channel | None = None

    @property
    def stub(self) -> inference_pb2_grpc.InferenceStub:
        if self.closed:
            raise RuntimeError("the client is closed")
        if self._channel is None:
            self._channel = open_channel(self.address)
        return inference_pb2_grpc.InferenceStub(self._channel)

    async def ask(self, method: str, request: Any, timeout: float | None) -> Any:
        """The answer to a call that is not a stream."""
        _check_timeout(timeout)
        try:
            answer = await getattr(self.stub, method)(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise self.failure(error) from None
        self.was_reached = True
        return answer

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
