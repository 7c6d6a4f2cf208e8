"""Tokens of a prompt without a generation, and texts of tokens."""

from __future__ import annotations

from outrider.errors import InvalidRequest
from outrider.wire import inference as wire
from router.requests.requests import find_model, parse
from router.sessions.context import RouterContext
from router.sessions.session_open import encode_prompt

MOST_TOKENS = 2**16  # context of a model that no verifier serves


async def tokenize(request: wire.TokenizeRequest, router: RouterContext, tenant: str) -> wire.TokenizeResponse:
    """Return the tokens of a tenant's prompt. Raises as a generation for it."""
    requested = await router.adapters.resolve(tenant, request.prompt.model)
    context = await _context(requested.name, router)
    params = parse(
        request.prompt,
        router.models,
        router.decoding.config,
        tenant=tenant,
        longest_context=lambda _: context or MOST_TOKENS,
        requested=requested,
    )
    tokens = await encode_prompt(params, first=not request.without_special)
    return wire.TokenizeResponse(
        count=len(tokens),
        ids=() if request.count_only else tokens,
        names=await params.model.token_names(tokens, tenant) if request.with_names else (),
        context=context,
    )


async def detokenize(request: wire.DetokenizeRequest, router: RouterContext, tenant: str) -> wire.DetokenizeResponse:
    """Return the text of tokens. Raises InvalidRequest, NotFound for an unknown model, Overloaded when too many of the
    tenant's texts wait."""
    requested = await router.adapters.resolve(tenant, request.model)
    most = await _context(requested.name, router) or MOST_TOKENS
    if (count := len(request.tokens.ids)) > most:
        raise InvalidRequest("tokens", f"are {count}, must be at most {most}")
    model = find_model(requested.name, router.models)
    return wire.DetokenizeResponse(text=await model.decode(tuple(request.tokens.ids), tenant))


async def _context(name: str, router: RouterContext) -> int:
    """Return the longest context of a model's verifiers; 0 without one. Raises NotFound for an unknown model."""
    model, pool = find_model(name, router.models), router.decoding.worker_pool
    await pool.verifiers(model.name)
    return pool.longest_context(model.name)
