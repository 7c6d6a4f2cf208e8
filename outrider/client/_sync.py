"""The client for synchronous code: an AsyncClient on a private event-loop thread."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, Self, TypeVar, Unpack

from outrider.client._async import AsyncClient
from outrider.client._connection import ConnectionOptions
from outrider.client._router import RETRIES
from outrider.client._stream import AsyncStream
from outrider.client._types import Chunk, Generation, Model, ModelAdapter, Session
from outrider.client._wire import Options
from outrider.errors import Cancelled

ResultT = TypeVar("ResultT")


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

    def generate(
        self, prompt: str | Sequence[int] | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Generation:
        """Generate the answer to a prompt (text or token ids) or to `messages`. See `Options` for the keywords."""
        return self._thread.run(lambda: self._client.generate(prompt, timeout=timeout, **options))

    def samples(
        self, prompt: str | Sequence[int] | None, n: int, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> list[Generation]:
        """Generate `n` answers to one prompt: the choices 0 to n - 1 of one seed, each in a separate session.

        The verifier reads the prompt once: the other answers begin when the first one has its first tokens. When one
        answer fails, all are cancelled. `timeout` applies to each answer.
        """
        return self._thread.run(lambda: self._client.samples(prompt, n, timeout=timeout, **options))

    def stream(
        self, prompt: str | Sequence[int] | None = None, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> Stream:
        """Return the answer as a stream. The call starts when the first chunk is requested."""
        return Stream(self._thread, self._client.stream(prompt, timeout=timeout, **options))

    def resume(
        self,
        session: str,
        *,
        generation: int = 0,
        next_position: int = 0,
        text_offset: int = 0,
        timeout: float | None = None,
    ) -> Stream:
        """Resume the latest generation of a session after the last chunk that was received, or from its start.

        Streams resume automatically while their client lives; this method is for another process that continues one.
        The result holds only what this stream received. Raises NotFound when the generation can no longer be resumed.
        """
        stream = self._client.resume(
            session, generation=generation, next_position=next_position, text_offset=text_offset, timeout=timeout
        )
        return Stream(self._thread, stream)

    def cancel(self, session: str, *, timeout: float | None = None) -> None:
        """Cancel a session's generation, whichever router and client it belongs to. Do nothing if it has ended."""
        self._thread.run(lambda: self._client.cancel(session, timeout=timeout))

    def create_session(self, model: str = "", *, timeout: float | None = None) -> Session:
        """Create an empty session for several turns. A generation without a session creates one."""
        return self._thread.run(lambda: self._client.create_session(model, timeout=timeout))

    def get_session(self, session: str, *, timeout: float | None = None) -> Session:
        """Return the state of a session. Raises NotFound."""
        return self._thread.run(lambda: self._client.get_session(session, timeout=timeout))

    def close_session(self, session: str, *, timeout: float | None = None) -> None:
        """End a session and delete its tokens. Do nothing if it is closed already."""
        self._thread.run(lambda: self._client.close_session(session, timeout=timeout))

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the models that are served now."""
        return self._thread.run(lambda: self._client.models(timeout=timeout))

    def load_adapter(self, name: str, folder: str, *, model: str = "", timeout: float | None = None) -> ModelAdapter:
        """Have all verifiers of a model load a low-rank adapter; see `AsyncClient.load_adapter`."""
        return self._thread.run(lambda: self._client.load_adapter(name, folder, model=model, timeout=timeout))

    def unload_adapter(self, name: str, *, timeout: float | None = None) -> None:
        """Take an adapter's name away; see `AsyncClient.unload_adapter`."""
        self._thread.run(lambda: self._client.unload_adapter(name, timeout=timeout))

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
