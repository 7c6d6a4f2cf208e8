"""Sends an answer as server-sent events, in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.client import Generation
from outrider.errors import OutriderError
from outrider.gateway import serialize
from outrider.gateway.errors import refusal
from outrider.gateway.multiplex import WAITING, ReceivedPart
from outrider.gateway.schema import ResponseTerms
from outrider.gateway.serialize import Json, PromptText, ResponseForm, StreamedText

KEEP_ALIVE = ": keep-alive\n\n"  # a comment, which clients ignore and proxies count as life


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
    characters = [0] * choices  # sent so far, of each choice
    ended: dict[int, Generation] = {}
    prompts, tokens = dict[int, int](), [0] * choices  # of each prompt, and of each choice so far
    prompt_texts = [PromptText() for _ in range(choices)]  # of those that are echoed

    def event(choice: Json) -> str:
        usage: Json = {"usage": None} if asked.include_usage else {}  # as OpenAI sends it in all events but the last
        if asked.continuous_usage:
            usage = {"usage": serialize.tokens(sum(prompts.values()), sum(tokens))}
        return _event(serialize.envelope(form.piece, **head, choices=[choice], **usage))

    try:
        part: ReceivedPart | None = first
        while part is not None:
            index = part.index
            if part is WAITING:
                yield KEEP_ALIVE
            chunk = part.chunk
            if chunk is not None and not chunk.prompt_logprobs:
                tokens[index] += len(chunk.token_ids)
                prompts.setdefault(index // asked.n, chunk.next_position - tokens[index])
            if chunk is not None and (chunk.text or chunk.logprobs or chunk.prompt_logprobs):
                text = chunk.text + prompt_texts[index].add(chunk.prompt_logprobs)
                entries = (chunk.prompt_logprobs or chunk.logprobs) if asked.alternatives is not None else None
                for piece in form.parts(StreamedText(index, text, entries, characters[index], part.reader)):
                    yield event(piece)
                characters[index] += len(text)
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
        yield _event(refusal(error, asked.names).body)
        return
    yield "data: [DONE]\n\n"


def _event(content: Json) -> str:
    return f"data: {json.dumps(content, default=list)}\n\n"
