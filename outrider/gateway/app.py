"""OpenAI's HTTP interface in front of a router. It is stateless: each request contains the whole conversation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version as version_of
from typing import Annotated, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from outrider.client import AsyncClient, AsyncStream
from outrider.config import GatewayConfig
from outrider.errors import NotFound, OutriderError, Unauthenticated
from outrider.gateway import serialize
from outrider.gateway.answer_body import body_pieces
from outrider.gateway.apis.answer_format import AnswerFormat
from outrider.gateway.apis.choices import chat_format, completion_format
from outrider.gateway.apis.messages import CountBody, MessagesBody
from outrider.gateway.apis.messages_format import messages_format
from outrider.gateway.apis.responses import ResponsesBody
from outrider.gateway.apis.responses_format import earlier_items, responses_format
from outrider.gateway.apis.tokens import DetokenizeBody, TokenizeBody, tokenized
from outrider.gateway.bodies import LargeBodies, parse_body, read_body, small_body
from outrider.gateway.clients import TenantClients
from outrider.gateway.errors import NO_NAMES, Refusal, body, in_shape, invalid, response
from outrider.gateway.held_answers import AnswerBounds, HeldAnswersLimit, answers_of
from outrider.gateway.keys import HEALTH, KeyCheck
from outrider.gateway.limits import BodyLimit, RequestLimit, TenantRefusals, TenantRequestLimit, body_of
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.multiplex import streams
from outrider.gateway.respond import answer, unless_gone
from outrider.gateway.schema import AnswerRequest, Chat, Completion, LoadAdapter, ResponseTerms, UnloadAdapter
from outrider.gateway.serialize import Json
from outrider.gateway.traces import linked
from outrider.gateway.transport.request_ids import ANTHROPIC_ID, REQUEST_ID, numbered
from outrider.rpc.certificate_expiry import CertificateExpiry
from outrider.rpc.supervision import keep_running
from outrider.telemetry.pages import Page

READING = ["GET", "HEAD"]

BodyT = TypeVar("BodyT", bound=AnswerRequest)
MakeFormat = Callable[[BodyT, ResponseTerms, AsyncClient], AnswerFormat]


def make_app(
    config: GatewayConfig,
    metrics: GatewayMetrics,
    expiry: CertificateExpiry | None = None,
    page: Page | None = None,
) -> FastAPI:
    """Return the application; `expiry`: of the certificate that it is served with; `page`: of its metrics, None: none.

    Raises ConfigError for settings with which no caller could use the router.
    """
    clients = TenantClients(config)
    keys = KeyCheck(clients.keyless)
    large = LargeBodies()
    bounds = AnswerBounds(config.timeout_s)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(keep_running("loop lag", metrics.lag.run))]
        if expiry is not None:
            tasks.append(asyncio.create_task(keep_running("certificate", expiry.run)))
        yield
        for task in tasks:
            task.cancel()
        await keys.close()
        await clients.close()

    app = FastAPI(title="Outrider", lifespan=lifespan, openapi_url=None, telemetry={"metrics": False})
    app.add_middleware(HeldAnswersLimit, config=config)
    app.add_middleware(BodyLimit, config=config)
    app.add_middleware(TenantRequestLimit, config=config)
    app.add_middleware(TenantRefusals)
    app.add_middleware(keys.middleware)
    app.add_middleware(RequestLimit, config=config)
    app.add_middleware(clients.tracking_requests)
    app.add_middleware(metrics.counted)
    app.add_middleware(linked)
    app.add_middleware(numbered)
    if config.cors_origins:  # outside of all others: a browser asks without a key whether it may call
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, ANTHROPIC_ID, "retry-after"],
        )

    async def begun(
        kind: type[BodyT], make_format: MakeFormat[BodyT], request: Request
    ) -> tuple[ResponseTerms, AnswerFormat, list[list[AsyncStream]]]:
        """Return what is asked for, its format, and the streams of the answers. What else the body has is kept by these
        alone."""
        body, client = await read_body(request), clients.client(request)
        earlier = await earlier_items(body, large.turn(len(body)), client) if kind is ResponsesBody else b""
        body_of(request).receive(2 * len(earlier))  # it is held until it is kept again, with the answer
        async with large.turn(len(body) + len(earlier)):
            parsed = (await parse_body(kind, body)).following(earlier)
            terms = parsed.terms
            body_of(request).copy(terms.n)  # each answer's call of the router has the prompt
            options = parsed.options()
            request.state.names = terms.names
            await asyncio.sleep(0)
            groups = await streams(client, parsed.prompts, terms.n, options, config.timeout_s)
            format_ = make_format(parsed, terms, client)
            del parsed, options
        await bounds.reserve(answers_of(request), terms, sum(map(len, groups)), client)
        return terms, format_, groups

    async def answered(kind: type[BodyT], make_format: MakeFormat[BodyT], request: Request) -> Response:
        terms, format_, groups = await begun(kind, make_format, request)
        return await unless_gone(request, answer(terms, groups, format_, answers_of(request), config.keep_alive_s))

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await answered(Completion, completion_format, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        return await answered(Chat, chat_format, request)

    @app.post("/v1/messages", response_model=None)
    async def messages(request: Request) -> Response:
        return await answered(MessagesBody, messages_format, request)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Json:
        client, body = clients.client(request), await read_body(request)
        async with large.turn(len(body)):
            parsed = await parse_body(CountBody, body)
            options, request.state.names = parsed.prompt_options(), parsed.names
        return {"input_tokens": (await client.tokenize(count_only=True, timeout=config.timeout_s, **options)).count}

    @app.post("/v1/responses", response_model=None)
    async def responses(request: Request) -> Response:
        return await answered(ResponsesBody, responses_format, request)

    @app.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Response:
        client, body = clients.client(request), await read_body(request)
        async with large.turn(len(body)):
            parsed = await parse_body(TokenizeBody, body)
            prompt, special, names = parsed.prompt, parsed.add_special_tokens is not False, parsed.return_token_strs
            options, request.state.names = parsed.options(), parsed.names
        tokens = await client.tokenize(prompt, special=special, names=names, timeout=config.timeout_s, **options)
        return StreamingResponse(body_pieces(tokenized(tokens, names=names)), media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Json:
        client, body = clients.client(request), await read_body(request)
        async with large.turn(len(body)):
            parsed = await parse_body(DetokenizeBody, body)
        return {"prompt": await client.detokenize(parsed.tokens, model=parsed.model, timeout=config.timeout_s)}

    @app.api_route("/v1/models", methods=READING)
    async def models(request: Request) -> Json:
        listed = await clients.client(request).models(timeout=config.timeout_s)
        return {"object": "list", "data": serialize.models(listed)}

    @app.api_route("/v1/models/{name:path}", methods=READING)
    async def model(name: str, request: Request) -> Json:
        for entry in serialize.models(await clients.client(request).models(timeout=config.timeout_s)):
            if entry["id"] == name:
                return entry
        raise NotFound(f"model {name!r} is not served here")

    @app.post("/v1/load_lora_adapter")
    async def load_adapter(
        parsed: Annotated[LoadAdapter, Depends(small_body(LoadAdapter))], request: Request
    ) -> PlainTextResponse:
        client, timeout = clients.client(request), config.timeout_s
        name, folder, model = parsed.lora_name, parsed.lora_path, parsed.base_model_name
        loaded = await client.load_adapter(name, folder, model=model, timeout=timeout)
        return PlainTextResponse(f"Success: adapter '{loaded.name}' of {loaded.model} is loaded.")

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(
        parsed: Annotated[UnloadAdapter, Depends(small_body(UnloadAdapter))], request: Request
    ) -> PlainTextResponse:
        await clients.client(request).unload_adapter(parsed.lora_name, timeout=config.timeout_s)
        return PlainTextResponse(f"Success: adapter '{parsed.lora_name}' is unloaded.")

    if page is not None:

        @app.api_route("/metrics", methods=READING)
        async def figures() -> Response:
            kind, content = await asyncio.to_thread(page)
            return Response(content, media_type=kind)

    @app.api_route("/version", methods=READING)
    async def version() -> Json:
        return {"version": version_of("outrider")}

    @app.api_route(HEALTH, methods=READING)
    async def health() -> Json:
        with suppress(Unauthenticated):  # the router answers, so it is healthy
            await keys.check("")
        return {"status": "ok"}

    @app.exception_handler(OutriderError)
    async def refused(request: Request, error: OutriderError) -> Response:
        return response(error, request.scope, getattr(request.state, "names", NO_NAMES))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return in_shape(Refusal(400, invalid(error), {}), request.scope)

    @app.exception_handler(HTTPException)
    async def not_served(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        content, headers = body(message, "invalid_request_error"), dict(error.headers or {})
        return in_shape(Refusal(error.status_code, content, headers), request.scope)

    return app
