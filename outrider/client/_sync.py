"""The client for synchronous code: an AsyncClient on a private event-loop thread."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

from outrider.client._async import AsyncClient
from outrider.client._connection import ConnectionOptions
from outrider.client._router import RETRIES
from outrider.client._stream import AsyncStream
from outrider.client._types import Chunk, Generation
from outrider.errors import Cancelled

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


def _blocking(
    method: Callable[Concatenate[AsyncClient, ParamsT], Coroutine[Any, Any, ResultT]],
) -> Callable[Concatenate[Client, ParamsT], ResultT]:
    """Return a method of `Client` that waits for one of `AsyncClient`."""

    @wraps(method)
    def call(self: Client, /, *arguments: ParamsT.args, **options: ParamsT.kwargs) -> ResultT:
        return self._thread.run(lambda: method(self._client, *arguments, **options))

    return call


def _streaming(
    method: Callable[Concatenate[AsyncClient, ParamsT], AsyncStream],
) -> Callable[Concatenate[Client, ParamsT], Stream]:
    """Return a method of `Client` that gives the stream of one of `AsyncClient`."""

    @wraps(method)
    def call(self: Client, /, *arguments: ParamsT.args, **options: ParamsT.kwargs) -> Stream:
        return Stream(self._thread, method(self._client, *arguments, **options))

    return call


class Client:
    """A connection to the router at `address`, opened by the first call. `AsyncClient` describes where settings come
    from, when TLS is used, and what is retried.

    Threads may share a client. Every call raises the errors of `outrider.errors`: InvalidRequest, NotFound,
    Overloaded, Unavailable, DeadlineExceeded when `timeout` (seconds, None for no limit) passes, and so on.
    Use it as a context manager or with `close`.
    """

    def __init__(
        self, address: str | None = None, *, retries: int = RETRIES, **connecting: Unpack[ConnectionOptions]
    ) -> None:
        self._client = AsyncClient(address, retries=retries, **connecting)
        self._thread = _LoopThread(self._client)
        self._finalizer = weakref.finalize(self, self._thread.close)  # also at interpreter exit

    @property
    def address(self) -> str:
        """The router's address, from the arguments, the environment or a profile."""
        return self._client.address

    stream = _streaming(AsyncClient.stream)
    resume = _streaming(AsyncClient.resume)
    generate = _blocking(AsyncClient.generate)
    samples = _blocking(AsyncClient.samples)
    cancel = _blocking(AsyncClient.cancel)
    create_session = _blocking(AsyncClient.create_session)
    get_session = _blocking(AsyncClient.get_session)
    close_session = _blocking(AsyncClient.close_session)
    models = _blocking(AsyncClient.models)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    load_adapter = _blocking(AsyncClient.load_adapter)
    unload_adapter = _blocking(AsyncClient.unload_adapter)

    def close(self) -> None:
        """End the streams that still run, on the server too, and disconnect. Closing twice is allowed."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """A running generation: iterate over its chunks, then read `result`.

    It continues after broken calls as `AsyncStream` does. Leaving the loop early, leaving a `with` block, or `cancel`
    (from any thread) ends it on the server too.
    """

    def __init__(self, thread: _LoopThread, stream: AsyncStream) -> None:
        self._thread = thread
        self._stream = stream

    @property
    def session_id(self) -> str:
        """The session's id once the first chunk has arrived; empty before."""
        return self._stream.session_id

    @property
    def result(self) -> Generation:
        """The complete generation once the last chunk has arrived. Raises RuntimeError before."""
        return self._stream.result

    def __iter__(self) -> Iterator[Chunk]:
        self._thread.run(self._begin)
        try:
            while (chunk := self._thread.run(self._stream.next)) is not None:
                yield chunk
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the generation, if it still runs, on the server too. A concurrent reader of the stream gets Cancelled."""
        self._thread.finish(self._stream.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    async def _begin(self) -> None:
        self._stream.begin()


class _LoopThread:
    """A thread with an event loop, on which the client runs."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()
        self._begun: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._serve, name="outrider-client", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Run `work` on the loop and return its result. An interrupt of the calling thread (Ctrl-C) cancels it.

        The loop's thread creates the coroutine, so that an interrupt leaves no coroutine that was never awaited.
        """
        if self._loop.is_closed():
            raise RuntimeError("the client is closed")
        result: Future[ResultT] = Future()
        try:
            self._loop.call_soon_threadsafe(self._start, work, result)
            return result.result()
        except CancelledError:
            raise Cancelled("the client was closed during the call") from None
        finally:
            result.cancel()

    def finish(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` if the loop is still open. The garbage collector may call this on any thread."""
        if self._loop.is_closed():
            return
        if threading.current_thread() is self._thread:
            self._begin(work())
        else:
            self.run(work)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(lambda: self._begin(self._shut_down()))
        if threading.current_thread() is not self._thread:  # the garbage collector may call this on the loop's thread
            self._thread.join()

    def _start(self, work: Callable[[], Coroutine[Any, Any, ResultT]], result: Future[ResultT]) -> None:
        if result.cancelled():
            return
        task = self._begin(work())
        result.add_done_callback(lambda _: self._withdraw(task, result))
        task.add_done_callback(lambda done: _hand_over(done, result))

    def _withdraw(self, task: asyncio.Task[ResultT], result: Future[ResultT]) -> None:
        """Cancel a task whose result is no longer wanted, from any thread."""
        if result.cancelled():
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(task.cancel)

    def _begin(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Start `work` as a task and keep a reference to it, because the loop keeps none."""
        task = self._loop.create_task(work)
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return task

    def _serve(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _shut_down(self) -> None:
        try:
            await self._client.close()
            running = asyncio.all_tasks() - {asyncio.current_task()}
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self._loop.shutdown_asyncgens()
        finally:
            self._loop.stop()


def _hand_over(task: asyncio.Task[ResultT], result: Future[ResultT]) -> None:
    error = None if task.cancelled() else task.exception()
    with suppress(InvalidStateError):  # the waiting thread has cancelled the future
        if task.cancelled():
            result.cancel()
        elif error is not None:
            result.set_exception(error)
        else:
            result.set_result(task.result())
