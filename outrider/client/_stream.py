"""One generation as a stream, over as many calls as it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any, Self

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind

from outrider.client import _wire
from outrider.client._calls import GeneratingCall
from outrider.client._received import GenerationRequest, ReceivedAnswer
from outrider.client._router import CLOSED, LONGEST_WAIT_S, Router, check_timeout, jittered, task_is_cancelled
from outrider.client._types import Chunk, Generation
from outrider.core.answers.answer_reader import ANY_TERMS, AnswerReader, AnswerTerms
from outrider.errors import Cancelled, Moved, OutriderError, Overloaded, Unavailable
from outrider.rpc.backoff import pause_s
from outrider.telemetry.tracing import TRACER, mark_failed, trace_metadata
from outrider.wire import inference as wire

CANCEL_TIMEOUT_S = 2.0
MAX_FAILURES = 6  # calls in a row without a new chunk, before a stream gives up
MOVE_PAUSE_S = 0.05  # before the second of several moves in a row
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between failed calls; each pause is up to twice the one before
MAX_MOVES = 64  # moves in a row without a new chunk; each is a router that shuts down in order


class AsyncStream:
    """A running generation: iterate over its chunks, then read `result`.

    When a call breaks off, another call continues after the last chunk: no token is lost or repeated. The stream raises
    the error when the timeout would pass, when several calls in a row bring no chunk, or when another client took the
    generation over. Leaving the loop early, leaving an `async with` block, or `cancel` ends it on the server too.
    """

    def __init__(
        self,
        router: Router,
        request: GenerationRequest,
        timeout: float | None,
        schema: Any = None,
        terms: AnswerTerms = ANY_TERMS,
    ) -> None:
        """`schema` and `terms` are the request's, for its result."""
        check_timeout(timeout)
        self._router = router
        self._answer = ReceivedAnswer(request, schema, terms)
        self._timeout = timeout
        self._span: Span = INVALID_SPAN  # around all calls of the stream
        self._give_up: float | None = None  # when the timeout passes, by the monotonic clock
        self._begun = False
        self._calls = 0  # since the last chunk
        self._moves = 0  # since the last chunk: calls that a router ended because it shuts down in order
        self._broke_off = False  # a call of this stream ended without order
        self._refusals = 0  # for lack of capacity
        self._resumes = 0
        self._call: GeneratingCall | None = None  # the running one
        self._waiting: GeneratingCall | asyncio.Task[None] | None = None
        self.keeps_answer = True  # set to False before the stream begins: its result has no text, tokens and the like
        self.discards_unread = False  # set to True: a cancelled generation leaves none of its tokens in the session
        self.stays_resumable = False  # set to True: when it is left, its generation stays for a repeated request
        self._result: Generation | None = None
        self._over = False  # nothing is left to cancel
        self._end_reason = ""  # set when this client ended the stream
        self._ending: asyncio.Task[None] | None = None

    def with_choice(self, choice: int) -> AsyncStream:
        """Return the stream of another choice of a request that has not begun, under an idempotency key of its own."""
        assert isinstance(self._answer.request, wire.GenerateRequest)
        request = wire.GenerateRequest()
        request.CopyFrom(self._answer.request)
        request.sampling.choice, request.idempotency_key = choice, _wire.random_key()
        request.return_prompt = False  # it is that of the first choice
        stream = AsyncStream(self._router, request, self._timeout, self._answer.schema, self._answer.terms)
        stream.keeps_answer = self.keeps_answer
        return stream

    @property
    def session_id(self) -> str:
        """The session's id once the first chunk has arrived; empty before."""
        return self._answer.started.session_id if self._answer.started else ""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose KV was cached, once the first chunk has arrived; 0 before."""
        return self._answer.started.cached_tokens if self._answer.started else 0

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Tokens of the prompt once the first chunk has arrived, if they were requested; empty before."""
        return self._answer.started.prompt_token_ids if self._answer.started else ()

    def reader(self) -> AnswerReader:
        """Return what divides the chunks' texts into content, reasoning and calls of tools, once the first chunk has
        arrived."""
        return AnswerReader(self._answer.form, self._answer.terms)

    @property
    def result(self) -> Generation:
        """The complete generation once the last chunk has arrived. Raises RuntimeError before."""
        if self._result is None:
            raise RuntimeError("the generation has not ended; read the stream to its end first")
        return self._result

    async def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        self.begin()
        try:
            while (chunk := await self.next()) is not None:
                yield chunk
        finally:
            await self.cancel()

    def begin(self) -> None:
        """Start the timeout; iteration calls this. Raises RuntimeError when the stream was begun before."""
        if self._begun:
            raise RuntimeError("a stream can be read only once")
        self._begun = True
        self._span = TRACER.start_span("generate", kind=SpanKind.INTERNAL)
        self._give_up = None if self._timeout is None else time.monotonic() + self._timeout
        self._router.endings.add(self._end)

    async def next(self) -> Chunk | None:
        """Return the next chunk of a stream that was begun; None when the generation has ended."""
        try:
            while self._result is None:
                if self._end_reason:
                    raise Cancelled(self._end_reason)
                try:
                    if (chunk := await self._receive()) is not None:
                        return chunk
                except (Unavailable, Overloaded) as error:
                    await self._pause(error)
        except OutriderError as error:
            mark_failed(self._span, type(error).__name__)
            if not self._end_reason:
                self._settle()
            if self._waiting is not None:
                self._waiting.cancel()  # the call has failed; its remaining messages are not wanted
            raise
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            raise Cancelled(self._end_reason or CLOSED) from None
        return None

    async def cancel(self) -> None:
        """End the generation, if it still runs, on the server too. A concurrent reader of the stream gets Cancelled."""
        await self._end("the generation was cancelled")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cancel()

    async def _receive(self) -> Chunk | None:
        """Return the chunk of the next event, None for another event. Make a new call if none runs."""
        if self._call is None:
            self._call = self._waiting = self._begin_call()
        event = await self._call.next()
        self._router.was_reached = True
        if event is None:
            raise Unavailable("the router ended the stream without a result")
        match event.WhichOneof("event"):
            case "following":
                self._answer.follows = True
            case "started":
                self._answer.started = self._answer.started or event.started
            case "chunk":
                self._calls = self._moves = 0
                return self._answer.add(event.chunk, keep=self.keeps_answer)
            case "finished":
                self._result = self._answer.result(event.finished, self._resumes)
                self._annotate_span(self._result)
                self._settle()
                with suppress(OutriderError):
                    await self._call.next()  # wait for the end of the call; no more events are needed
            case _:  # an event of a later version
                pass
        return None

    def _begin_call(self) -> GeneratingCall:
        """Make a call that continues where the last one ended."""
        self._calls += 1
        left = self._left()
        timeout = None if left is None else max(left, 0.0)
        request = self._answer.next_request(broke_off=self._broke_off)
        return self._router.generate(request, timeout, trace_metadata(self._span))

    async def _pause(self, error: Unavailable | Overloaded) -> None:
        """Wait before the next call. Raises the error if another call cannot help or would come after the timeout."""
        self._call = None
        self._broke_off |= isinstance(error, Unavailable) and not isinstance(error, Moved)
        if self._end_reason:
            raise Cancelled(self._end_reason)
        if isinstance(error, Overloaded):
            has_retries = self._answer.started is not None or self._refusals < self._router.retries
            retry = has_retries and error.retry_after <= LONGEST_WAIT_S
            pause = error.retry_after
            self._refusals += 1
        elif isinstance(error, Moved):
            retry = self._moves < MAX_MOVES
            pause = MOVE_PAUSE_S if self._moves else 0.0  # the next call usually reaches another router
            self._moves += 1
            self._calls -= 1
        else:
            retry = self._answer.started is not None or self._router.was_reached
            pause = pause_s(self._calls, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        pause = jittered(pause)
        left = self._left()
        if not retry or self._calls >= MAX_FAILURES or (left is not None and left <= pause):
            raise error
        self._resumes += self._answer.started is not None or not isinstance(error, Overloaded)
        self._span.add_event("resume", {"error.type": type(error).__name__, "outrider.pause": pause})
        self._waiting = asyncio.create_task(asyncio.sleep(pause))
        await self._waiting

    def _left(self) -> float | None:
        return None if self._give_up is None else self._give_up - time.monotonic()

    async def _end(self, reason: str) -> None:
        if self._ending is None:
            if self._over:
                return
            self._end_reason = reason
            if self._waiting is not None:
                self._waiting.cancel()
            self._ending = asyncio.create_task(self._cancel_on_server())
        await asyncio.shield(self._ending)  # the server is informed even if the waiting task is cancelled

    async def _cancel_on_server(self) -> None:
        """Cancel the generation on the router. A call that only breaks off would stay resumable for a while."""
        session_id = self.session_id or self._answer.request.session_id
        try:
            if self._waiting is not None and session_id and not self.stays_resumable:
                request = wire.CancelRequest(session_id=session_id, discard=self.discards_unread)
                with suppress(OutriderError, RuntimeError):  # RuntimeError: the client is closed
                    await self._router.ask("Cancel", request, CANCEL_TIMEOUT_S)
        finally:
            self._settle()

    def _settle(self) -> None:
        self._over = True
        self._span.end()
        self._router.endings.discard(self._end)

    def _annotate_span(self, result: Generation) -> None:
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    "gen_ai.provider.name": "outrider",
                    "gen_ai.request.model": result.model,
                    "gen_ai.response.finish_reasons": [result.finish_reason.value],
                    "gen_ai.usage.input_tokens": result.usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": result.usage.completion_tokens,
                    "outrider.session.id": result.session_id,
                    "outrider.resumes": result.resumes,
                }
            )
