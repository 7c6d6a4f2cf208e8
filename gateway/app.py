"""OpenAI's HTTP interface in front of a router. It keeps nothing: a conversation is what its request says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from gateway import answers
from gateway.answering import answer, unless_gone
from gateway.answers import ChatForm, CompletionForm, Form, Json
from gateway.bounded import Bounded
from gateway.callers import Callers
from gateway.choices import Prompt, streams
from gateway.metrics import Metrics
from gateway.refusals import body, invalid, refusal
from gateway.schema import Chat, Completion, Sampled
from outrider.client import Options
from outrider.config import GatewayConfig
from outrider.errors import NotFound, OutriderError, Unauthenticated
from outrider.rpc.supervision import kept

HEALTH_S = 2.0  # that a router may take to say that it is there


def make_app(config: GatewayConfig) -> FastAPI:
    """The application. Raises ConfigError when it could not speak to its router for anybody."""
    callers, metrics = Callers(config), Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        measuring = asyncio.create_task(kept("loop lag", metrics.lag.run))
        yield
        measuring.cancel()
        await callers.close()

    app = FastAPI(title="Outrider", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Bounded, most=config.max_request_bytes)
    app.add_middleware(callers.lending)
    app.add_middleware(metrics.counted)

    async def answered(
        asked: Sampled, prompts: Sequence[Prompt], options: Options, form: Form, request: Request
    ) -> Response:
        groups = streams(callers.client(request), prompts, asked.n, options, config.timeout_s)
        return await unless_gone(request, answer(asked, groups, form))

    @app.post("/v1/completions", response_model=None)
    async def completions(asked: Completion, request: Request) -> Response:
        return await answered(asked, asked.prompts, asked.options(), CompletionForm(), request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: Chat, request: Request) -> Response:
        options: Options = {**asked.options(), "messages": [message.said for message in asked.messages]}
        return await answered(asked, [None], options, ChatForm(), request)

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
        status, said, headers = refusal(error)
        return JSONResponse(said, status, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> Response:
        return JSONResponse(invalid(error), 400)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        said = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(body(said, "invalid_request_error"), error.status_code, headers=error.headers)

    return app
