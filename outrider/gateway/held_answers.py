"""Bounds on what the gateway holds of answers, a part of which each tenant has as of its requests' bodies.

What an answer's log-probabilities may take is counted before the answer begins; its text when it comes. Of a streamed
answer no more is held than the router sends ahead.
"""

from __future__ import annotations

import time

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.client import AsyncClient, Chunk
from outrider.config import GatewayConfig
from outrider.errors import InvalidRequest
from outrider.gateway import serialize
from outrider.gateway.keys import TENANT
from outrider.gateway.schema import ResponseTerms
from outrider.limits.tenant_shares import TenantShares

OF_BODIES = 4  # answers may hold this many times the bytes of all bodies
ROW_BYTES = 64  # of a token with its log-probability
ALTERNATIVE_BYTES = 20  # of each alternative, with 11 of its text; what longer ones take is counted when they come
OVERHEAD_BYTES = 41  # of Python for each row
WIDE_BYTES = 4  # of a character in a text that is not ASCII
ID_BYTES = 48  # of a token's id: Python's number, and references to it
AHEAD_BYTES = 2**16  # of a streamed answer, which are sent before the client takes them
CONTEXTS_S = 60.0  # how long contexts are used again
_HELD = "outrider.answers"  # key in a request's scope: its HeldAnswers


class HeldAnswers:
    """The bytes that the answers of one request hold, or may come to hold."""

    def __init__(self, total: TenantShares, tenant: str) -> None:
        self._total = total
        self._tenant = tenant
        self._counted = self._held = 0

    @property
    def most(self) -> int:
        """The most bytes that the answers of a request may hold."""
        return self._total.most_of(self._tenant)

    def reserve(self, size: int) -> None:
        """Count bytes that may come. Raises Overloaded."""
        self._total.add(self._tenant, size)
        self._counted += size

    def add(self, chunk: Chunk) -> None:
        """Count what is kept of a chunk, as far as it was not reserved. Raises Overloaded."""
        text, rows = chunk.text, chunk.logprobs.rows + chunk.prompt_logprobs.rows
        self._held += len(text) * (1 if text.isascii() else WIDE_BYTES)
        self._held += sum(map(len, rows)) + OVERHEAD_BYTES * len(rows)
        self._reserve_held()

    def add_ids(self, count: int) -> None:
        """Count ids of tokens that are kept. Raises Overloaded."""
        self._held += ID_BYTES * count
        self._reserve_held()

    def _reserve_held(self) -> None:
        if (more := self._held - self._counted) > 0:
            self.reserve(more)

    def release(self) -> None:
        """Count the answers no longer."""
        self._total.release(self._tenant, self._counted)


def answers_of(request: Request) -> HeldAnswers:
    """Return what the answers of a request hold, which `HeldAnswersLimit` counts."""
    held: HeldAnswers = request.scope[_HELD]
    return held


class HeldAnswersLimit:
    """Middleware that counts what answers hold until they are sent. It needs the key's tenant."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._app = app
        self._total = TenantShares(OF_BODIES * config.max_total_bytes, "bytes of answers")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        held = HeldAnswers(self._total, scope.get(TENANT, ""))
        try:
            await self._app({**scope, _HELD: held}, receive, send)
        finally:
            held.release()


def _row_bytes(alternatives: int | None) -> int:
    """Return the bytes of a token with its log-probabilities, 0 without any."""
    return 0 if alternatives is None else ROW_BYTES + ALTERNATIVE_BYTES * alternatives


class AnswerBounds:
    """Computes what answers may hold. Asks the router for the contexts of its models, once in `CONTEXTS_S`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._contexts: dict[str, int] = {}
        self._until = 0.0

    async def reserve(self, held: HeldAnswers, terms: ResponseTerms, answers: int, client: AsyncClient) -> None:
        """Count what the log-probabilities of a request's `answers` and their prompts may hold.

        Raises InvalidRequest for what no tenant may hold, Overloaded if there is no room now, and the router's errors.
        """
        each, each_of_prompt = _row_bytes(terms.alternatives), _row_bytes(terms.prompt_alternatives)
        if not each and not each_of_prompt:
            return
        tokens, limits = terms.token_limit, terms.prompt_limits
        if terms.stream:
            short = not each_of_prompt and tokens is not None
            held.reserve(answers * min(AHEAD_BYTES, each * (tokens or 0)) if short else answers * AHEAD_BYTES)
            return
        known = answers * each * (tokens or 0) + terms.n * each_of_prompt * sum(limit or 0 for limit in limits)
        if (each and tokens is None) or (each_of_prompt and None in limits) or known > held.most:
            context = await self._context(terms.model, client)
            tokens = context if tokens is None else min(tokens, context)
            limits = [context if limit is None else min(limit, context) for limit in limits]
        of_prompts = terms.n * each_of_prompt * sum(limit or 0 for limit in limits)
        size = answers * each * (tokens or 0)
        if of_prompts > held.most:
            raise InvalidRequest("prompt", "has too many tokens with log-probabilities; send it in several requests")
        if of_prompts + size > held.most:
            raise InvalidRequest(
                "max_tokens",
                f"must be at most {(held.most - of_prompts) // (answers * each)} for {answers} answers with "
                f"{terms.alternatives} log-probabilities for each token, which are not streamed",
            )
        held.reserve(of_prompts + size)

    async def _context(self, model: str, client: AsyncClient) -> int:
        """Return the context of a model, or the longest one if it is not known."""
        if time.monotonic() >= self._until:
            entries = serialize.models(await client.models(timeout=self._timeout_s))
            self._contexts = {entry["id"]: entry["context_window"] for entry in entries}
            self._until = time.monotonic() + CONTEXTS_S
        return self._contexts.get(model) or max(self._contexts.values(), default=0)
