"""From the streams of a request to its response, while somebody waits for it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from gateway import answers
from gateway.answers import Form, Json
from gateway.choices import heard
from gateway.events import EventStream, said
from gateway.schema import Sampled
from outrider.client import AsyncStream, Generation
from outrider.errors import Cancelled


async def answer(asked: Sampled, groups: Sequence[Sequence[AsyncStream]], form: Form) -> Response:
    """All choices of all prompts, whole or as they come. Raises what the SDK raises before the first is heard of."""
    count = sum(map(len, groups))
    head: Json = {"id_": form.prefix + secrets.token_hex(12), "model": asked.model, "created": int(time.time())}
    events = heard(groups)
    if asked.stream:
        try:
            first = await anext(events)  # what is refused has a status of its own
        except BaseException:
            await events.aclose()
            raise
        return EventStream(said(form, head, asked, count, first, events), events)
    ended: dict[int, Generation] = {}
    async with aclosing(events):
        async for news in events:
            if news.ended is not None:
                ended[news.index] = news.ended
    generations = [ended[index] for index in range(count)]
    choices = [form.whole(index, generation) for index, generation in enumerate(generations)]
    usage = answers.cost(generations, asked.n)
    return JSONResponse(answers.envelope(form.kind, **head, choices=choices, usage=usage))


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Its response. Raises Cancelled, and has it worked for no more, when the client has gone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise Cancelled("the client has gone")
        return answering.result()
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.wait({answering, leaving})
