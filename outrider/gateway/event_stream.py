"""Sends an answer as server-sent events, in OpenAI's format."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.client import Generation
from outrider.errors import OutriderError
from outrider.gateway import serialize
from outrider.gateway.errors import refusal
from outrider.gateway.multiplex import ReceivedPart
from outrider.gateway.schema import ResponseTerms
from outrider.gateway.serialize import Json, ResponseForm, StreamedText

PADDED_BYTES = 4096  # of a piece of a padded stream; a longer event has a multiple
MAX_PACED = 64  # events that wait for the next piece


class EventStream(StreamingResponse):
    """A response of server-sent events. When the HTTP client disconnects, the sources are closed at once."""

    def __init__(self, events: AsyncGenerator[str, None], parts: AsyncGenerator[ReceivedPart, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._sources = (events, parts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for source in self._sources:
                await source.aclose()


async def server_sent_events(
    form: ResponseForm,
    head: Json,
    asked: ResponseTerms,
    choices: int,
    first: ReceivedPart,
    parts: AsyncGenerator[ReceivedPart, None],
) -> AsyncGenerator[str, None]:
    """Yield the events of `first` and the following parts, then the usage if the request wants it, then [DONE].

    An error becomes the last event, because the HTTP status has been sent already.
    """
    begun: set[int] = set()
    characters = [0] * choices  # sent so far, of each choice
    ended: dict[int, Generation] = {}
    no_usage: Json = {"usage": None} if asked.include_usage else {}  # OpenAI sends it in all events but the last

    def event(choice: Json) -> str:
        return _event(serialize.envelope(form.piece, **head, choices=[choice], **no_usage))

    try:
        part: ReceivedPart | None = first
        while part is not None:
            index = part.index
            if index not in begun:
                begun.add(index)
                if (opening := form.first(index)) is not None:
                    yield event(opening)
            if part.chunk is not None and (part.chunk.text or part.chunk.logprobs):
                entries = part.chunk.logprobs if asked.alternatives is not None else None
                text = StreamedText(index, part.chunk.text, entries, characters[index], part.reader)
                for piece in form.parts(text):
                    yield event(piece)
                characters[index] += len(part.chunk.text)
            if part.ended is not None:
                ended[index] = part.ended
                for piece in form.last(index, serialize.reason(part.ended)):
                    yield event(piece)
            part = await anext(parts, None)
        if asked.include_usage:
            generations = [ended[index] for index in range(choices)]
            usage, metrics = serialize.cost(generations, asked.n), serialize.speculation(generations)
            yield _event(serialize.envelope(form.piece, **head, choices=[], usage=usage, **metrics))
    except OutriderError as error:
        yield _event(refusal(error).body)
        return
    yield "data: [DONE]\n\n"


async def paced(events: AsyncGenerator[str, None], interval_s: float) -> AsyncGenerator[str, None]:
    """Yield the events in pieces of equal size at equal intervals, whenever they come: who watches the network sees
    neither how many tokens came together nor when (arXiv 2411.01076). Padding is a comment, which readers skip.
    """
    queue: asyncio.Queue[str | None] = asyncio.Queue(MAX_PACED)

    async def read() -> None:
        async with aclosing(events):
            async for event in events:
                await queue.put(event)
        await queue.put(None)

    reading = asyncio.create_task(read())
    due, ended = time.monotonic(), False
    try:
        while not ended:
            pieces: list[str] = []
            while not queue.empty() and sum(map(len, pieces)) < PADDED_BYTES // 2:
                piece = queue.get_nowait()
                ended = piece is None
                if piece is not None:
                    pieces.append(piece)
            if reading.done() and (error := reading.exception()) is not None:
                raise error
            text = "".join(pieces)
            left = -len(text.encode()) % PADDED_BYTES
            yield f": {'.' * ((left if left >= 4 else left + PADDED_BYTES) - 4)}\n\n" + text
            due = max(due + interval_s, time.monotonic())
            await asyncio.sleep(0 if ended else due - time.monotonic())
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _event(content: Json) -> str:
    return f"data: {json.dumps(content, default=list)}\n\n"
