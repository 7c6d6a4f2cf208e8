"""Sends an answer as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.errors import OutriderError
from outrider.gateway.apis.answer_format import AnswerFormat
from outrider.gateway.errors import refusal
from outrider.gateway.held_answers import HeldAnswers
from outrider.gateway.multiplex import WAITING, ReceivedPart


class EventStream(StreamingResponse):
    """A response of server-sent events. When the HTTP client disconnects, the sources are closed at once."""

    def __init__(
        self, events: AsyncGenerator[str, None], parts: AsyncGenerator[ReceivedPart, None], headers: dict[str, str]
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        self._sources = (events, parts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for source in self._sources:
                await source.aclose()


async def server_sent_events(
    format_: AnswerFormat,
    names: Mapping[str, str],
    held: HeldAnswers,
    first: ReceivedPart,
    parts: AsyncGenerator[ReceivedPart, None],
) -> AsyncGenerator[str, None]:
    """Yield the events of `first` and the following parts, then those behind the end of all answers.

    An error becomes the last event, because the HTTP status has been sent already. `names`: as of `refusal`.
    """
    try:
        part: ReceivedPart | None = first
        while part is not None:
            if part is WAITING:
                yield format_.keep_alive
            else:
                held.add_ids(len(part.prompt_token_ids))
                if format_.keeps_text and part.chunk is not None:
                    held.add(part.chunk)
                for event in format_.events(part):
                    yield event
            part = await anext(parts, None)
        for event in await format_.last():
            yield event
    except OutriderError as error:
        for event in format_.failed(refusal(error, names)):
            yield event
