"""Turns the streams of a request into its HTTP response, as long as the HTTP client waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from io import StringIO
from itertools import chain
from typing import Any
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from outrider.client import AsyncStream, Generation, LogprobRows
from outrider.errors import Cancelled
from outrider.gateway.answer_body import body_pieces
from outrider.gateway.apis.answer_format import AnswerFormat
from outrider.gateway.event_stream import EventStream, server_sent_events
from outrider.gateway.held_answers import HeldAnswers
from outrider.gateway.multiplex import merged
from outrider.gateway.schema import ResponseTerms
from outrider.gateway.serialize import PromptText

NOT_ENFORCED = "outrider-not-enforced"  # header: what the answer may break of the request's schemas
MOST_SHOWN, MOST_CHARACTERS = 16, 1024  # of it
HEADERS_S = 1.0  # longest wait for the first part of a stream before its headers are sent


async def answer(
    asked: ResponseTerms,
    groups: Sequence[Sequence[AsyncStream]],
    format_: AnswerFormat,
    held: HeldAnswers,
    keep_alive_s: float,
) -> Response:
    """Return the response with all choices of all prompts, in a format, complete or as a stream of events.

    A stream begins when its first part has come, or after a second, so that a request that is refused has an HTTP
    status of its own, and one that waits has its headers; then it has a sign of life every `keep_alive_s`.

    Complete answers are kept compactly and count to `held`; their JSON is made while it is sent.

    Raises the SDK's errors; for a stream of events, only those before the first part.
    """
    count = sum(map(len, groups))
    parts = merged(groups, (HEADERS_S, keep_alive_s) if asked.stream else (None, None), answers=asked.token_limit != 0)
    if asked.stream:
        try:
            first = await anext(parts)
        except BaseException:
            await parts.aclose()
            raise
        events = server_sent_events(format_, asked.names, held, first, parts)
        return EventStream(events, parts, _headers(asked))
    for stream in chain.from_iterable(groups):  # whoever leaves has received nothing
        stream.discards_unread = True
    ended: dict[int, Generation] = {}
    texts, rows = [StringIO() for _ in range(count)], [list[bytes]() for _ in range(count)]
    ids = [list[int]() for _ in range(count)]
    prompts, prompt_texts = [list[bytes]() for _ in range(count)], [PromptText() for _ in range(count)]
    async with aclosing(parts):
        async for part in parts:
            held.add_ids(len(part.prompt_token_ids))
            if part.chunk is not None:
                held.add(part.chunk)
                prompts[part.index].extend(part.chunk.prompt_logprobs.rows)
                if asked.echo:
                    texts[part.index].write(prompt_texts[part.index].add(part.chunk.prompt_logprobs))
                texts[part.index].write(part.chunk.text)
                rows[part.index].extend(part.chunk.logprobs.rows)
                if asked.token_ids:
                    held.add_ids(len(part.chunk.token_ids))
                    ids[part.index].extend(part.chunk.token_ids)
            if part.ended is not None:
                ended[part.index] = part.ended
    generations = [
        replace(
            ended[index],
            text=texts[index].getvalue(),
            token_ids=tuple(ids[index]),
            prompt_token_ids=ended[index - index % asked.n].prompt_token_ids,
            logprobs=LogprobRows(rows[index]),
            prompt_logprobs=LogprobRows(prompts[index]),
        )
        for index in range(count)
    ]
    content = body_pieces(await format_.body(generations))
    return StreamingResponse(content, media_type="application/json", headers=_headers(asked))


def _headers(asked: ResponseTerms) -> dict[str, str]:
    shown = [quote(pointer, safe="#/$") for pointer in asked.not_enforced[:MOST_SHOWN]]
    return {NOT_ENFORCED: ", ".join(shown)[:MOST_CHARACTERS]} if shown else {}


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the response of `work`. When the HTTP client disconnects, cancel `work` and raise Cancelled."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise Cancelled("the client has gone")
        return answering.result()
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.wait({answering, leaving})
