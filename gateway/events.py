"""An answer as server-sent events, in OpenAI's words."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway import answers
from gateway.answers import Form, Json
from gateway.choices import Heard
from gateway.refusals import refusal
from gateway.schema import Sampled
from outrider.client import Generation
from outrider.errors import OutriderError


class EventStream(StreamingResponse):
    """Server-sent events. When the client has gone, what they come from is closed at once."""

    def __init__(self, said: AsyncGenerator[str, None], events: AsyncGenerator[Heard, None]) -> None:
        super().__init__(said, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._sources = (said, events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for source in self._sources:
                await source.aclose()


async def said(
    form: Form, head: Json, asked: Sampled, choices: int, first: Heard, events: AsyncGenerator[Heard, None]
) -> AsyncGenerator[str, None]:
    """The events: `first` and what follows it, then what it cost if that is asked for, then [DONE].

    What goes wrong is the last one: the status has gone out.
    """
    begun: set[int] = set()
    characters = [0] * choices  # that were said
    ended: dict[int, Generation] = {}
    without: Json = {"usage": None} if asked.include_usage else {}  # so OpenAI has it in all events but the last

    def event(choice: Json) -> str:
        return _event(answers.envelope(form.piece, **head, choices=[choice], **without))

    try:
        news: Heard | None = first
        while news is not None:
            index = news.index
            if index not in begun:
                begun.add(index)
                if (opening := form.first(index)) is not None:
                    yield event(opening)
            if news.chunk is not None and (news.chunk.text or news.chunk.logprobs):
                entries = news.chunk.logprobs if asked.alternatives is not None else None
                yield event(form.part(index, news.chunk.text, entries, characters[index]))
                characters[index] += len(news.chunk.text)
            if news.ended is not None:
                ended[index] = news.ended
                yield event(form.last(index, answers.reason(news.ended)))
            news = await anext(events, None)
        if asked.include_usage:
            usage = answers.cost([ended[index] for index in range(choices)], asked.n)
            yield _event(answers.envelope(form.piece, **head, choices=[], usage=usage))
    except OutriderError as error:
        yield _event(refusal(error).body)
        return
    yield "data: [DONE]\n\n"


def _event(shown: Json) -> str:
    return f"data: {json.dumps(shown)}\n\n"
