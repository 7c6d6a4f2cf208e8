"""OpenAI's HTTP interface in front of a router. It keeps nothing: a conversation is what its request says."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import answers
from gateway.answers import ChatForm, CompletionForm, Form, Json
from gateway.choices import Heard, Prompt, heard, streams
from gateway.metrics import Metrics
from gateway.refusals import body, refusal
from gateway.schema import Chat, Completion, Sampled
from outrider.client import AsyncClient, AsyncStream, Generation, Options
from outrider.config import GatewayConfig
from outrider.errors import Cancelled, NotFound, OutriderError, Unauthenticated

CLIENTS = 256  # callers' connections that are kept; each has its key
HEALTH_S = 2.0  # that a router may take to say that it is there


class Callers:
    """A client of the router for each API key, the latest ones."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._clients: OrderedDict[str, AsyncClient] = OrderedDict()

    def client(self, request: Request) -> AsyncClient:
        """For whoever sent this: his key goes on to the router, which judges it."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if key not in self._clients:
            config = self._config
            self._clients[key] = AsyncClient(
                config.router, api_key=key, ca=config.ca, tls=config.tls, server_name=config.server_name
            )
        self._clients.move_to_end(key)
        return self._clients[key]

    async def close(self) -> None:
        """All of them."""
        while self._clients:
            await self._clients.popitem()[1].close()


def make_app(config: GatewayConfig) -> FastAPI:
    """The application."""
    callers = Callers(config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await callers.close()

    metrics = Metrics()
    app = FastAPI(title="Outrider", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Bounded, most=config.max_request_bytes)
    app.add_middleware(metrics.counted)

    async def answer(
        asked: Sampled, prompts: Sequence[Prompt], options: Options, form: Form, request: Request
    ) -> Response:
        groups = streams(callers.client(request), prompts, asked.n, options, config.timeout_s)
        return await _unless_gone(request, _answer(asked, groups, form))

    @app.post("/v1/completions", response_model=None)
    async def completions(asked: Completion, request: Request) -> Response:
        return await answer(asked, asked.prompts, asked.options(), CompletionForm(), request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: Chat, request: Request) -> Response:
        options: Options = {**asked.options(), "messages": [message.said for message in asked.messages]}
        return await answer(asked, [None], options, ChatForm(), request)

    @app.get("/v1/models")
    async def models(request: Request) -> Json:
        listed = await callers.client(request).models(timeout=config.timeout_s)
        return {"object": "list", "data": [answers.model(entry) for entry in listed]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Json:
        for entry in await callers.client(request).models(timeout=config.timeout_s):
            if entry.name == name:
                return answers.model(entry)
        raise NotFound(f"model {name!r} is not served here")

    @app.get("/health")
    async def health(request: Request) -> Json:
        with suppress(Unauthenticated):  # it answers
            await callers.client(request).models(timeout=HEALTH_S)
        return {"status": "ok"}

    @app.get("/metrics")
    async def counters() -> Response:
        return Response(metrics.shown(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(OutriderError)
    async def refused(request: Request, error: OutriderError) -> Response:
        return _refused(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return JSONResponse(_invalid(error), 400)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        said = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(body(said, "invalid_request_error"), error.status_code, headers=error.headers)

    return app


async def _answer(asked: Sampled, groups: Sequence[Sequence[AsyncStream]], form: Form) -> Response:
    count = sum(map(len, groups))
    head: Json = {"id_": form.prefix + secrets.token_hex(12), "model": asked.model, "created": answers.now()}
    events = heard(groups)
    if asked.stream:
        try:
            first = await anext(events)  # what is refused has a status of its own
        except BaseException:
            await events.aclose()
            raise
        return EventStream(_said(form, head, asked, count, first, events), events)
    ended: dict[int, Generation] = {}
    async with aclosing(events):
        async for news in events:
            if news.ended is not None:
                ended[news.index] = news.ended
    generations = [ended[index] for index in range(count)]
    choices = [form.whole(index, generation) for index, generation in enumerate(generations)]
    return JSONResponse(answers.envelope(form.kind, **head, choices=choices, usage=_cost(generations, asked.n)))


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


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Its answer, which is not worked for any more when the client has gone."""

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


async def _said(
    form: Form, head: Json, asked: Sampled, choices: int, first: Heard, events: AsyncGenerator[Heard, None]
) -> AsyncGenerator[str, None]:
    """A stream of server-sent events. Leaving it cancels what has not ended."""
    begun: set[int] = set()
    said = [0] * choices  # characters
    ended: dict[int, Generation] = {}

    def event(*listed: Json | None, **more: Any) -> str:
        shown = [choice for choice in listed if choice is not None]
        return f"data: {json.dumps(answers.envelope(form.piece, **head, choices=shown, **more))}\n\n"

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
                yield event(form.part(index, news.chunk.text, entries, said[index]))
                said[index] += len(news.chunk.text)
            if news.ended is not None:
                ended[index] = news.ended
                yield event(form.last(index, answers.reason(news.ended)))
            news = await anext(events, None)
        if asked.include_usage:
            yield event(usage=_cost([ended[index] for index in range(choices)], asked.n))
    except OutriderError as error:  # the status has gone out
        yield f"data: {json.dumps(refusal(error).body)}\n\n"
        return
    yield "data: [DONE]\n\n"


def _cost(generations: Sequence[Generation], n: int) -> Json:
    """Of all choices; a prompt counts once, however many choices it has."""
    prompts = sum(generation.usage.prompt_tokens for generation in generations[::n])
    return answers.usage(prompts, [(generation.usage, generation.cached_tokens) for generation in generations])


def _refused(error: OutriderError) -> Response:
    status, said, headers = refusal(error)
    return JSONResponse(said, status, headers=headers)


def _invalid(error: RequestValidationError) -> Json:
    """OpenAI's words for the first thing that is wrong."""
    entry = error.errors()[0]
    path = [str(part) for part in entry["loc"][1:]]
    match entry["type"]:
        case "extra_forbidden":
            return body(f"Unrecognized request argument supplied: {'.'.join(path)}", "invalid_request_error")
        case "missing":
            return body(f"you must provide a {'.'.join(path)} parameter", "invalid_request_error", ".".join(path))
        case "json_invalid":
            return body("We could not parse the JSON body of your request.", "invalid_request_error")
    text = str(entry["msg"]).removeprefix("Value error, ")
    if path:  # what follows the name tells which of several forms it was held against
        return body(f"{path[0]}: {text}", "invalid_request_error", path[0])
    named = text.partition(":")[0]
    return body(text, "invalid_request_error", named if named.isidentifier() else None)


class Bounded:
    """Refuses bodies that are too large, before they are in memory."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._most:
            await self._too_large()(scope, receive, send)
            return
        got = 0

        async def counted() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self._most:
                raise HTTPException(413, f"is larger than {self._most} bytes")
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> Response:
        return JSONResponse(body(f"the body is larger than {self._most} bytes", "invalid_request_error"), 413)
